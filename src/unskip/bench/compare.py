"""The comparison: networks side by side in one process, rounds interleaved."""

import dataclasses
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch

from unskip._core.errors import RUN_ERRORS, reason
from unskip.bench.compiling import Job, cause, compile_ahead, make_forms, read
from unskip.bench.floor import Rates, Work, measure_rates, work
from unskip.bench.networks import AS_TRAINED, Candidate, check_outputs, common_input, load
from unskip.bench.runner import Reading, Runner, tuned
from unskip.bench.setting import Case, Mode, Setting
from unskip.io.load import Shape
from unskip.models.about import frozen_weights

Say = Callable[[str], None]


@dataclasses.dataclass(kw_only=True)
class Row:
    """What was found about one case. Numbers that were not reached are None."""

    case: Case
    rounds: list[float] = dataclasses.field(default_factory=list)  # images a second
    memory: int | None = None  # bytes at the peak of a step
    first_step: float | None = None  # seconds, most of them the compiler's
    work: Work | None = None
    finite: bool | None = None
    error: str = ""

    @property
    def images_per_s(self) -> float | None:
        return statistics.median(self.rounds) if self.rounds else None


class Comparison:
    """Two or more networks under one setting. `run` fills `rows`; they can be read at any moment, also after Ctrl-C."""

    def __init__(
        self,
        words: Sequence[str],
        setting: Setting,
        say: Say = lambda _: None,
        *,
        train_only: Sequence[str] = (),  # networks that do inference as another one does
        without: Sequence[str] = (),  # forms for inference that are left out
    ) -> None:
        if len(words) < 2:
            raise ValueError(
                f"bench: a comparison needs two networks or more, and {' '.join(words) or 'none'} was all; add another "
                "name, for instance pnnh_resnet34 beside resnet34."
            )
        if len(set(words)) < len(words):
            raise ValueError(f"bench: a network is named twice in {', '.join(words)}; each has one place.")
        self.words, self.setting, self.say = tuple(words), setting, say
        self.train_only, self.without = tuple(train_only), tuple(without)
        contenders = [load(word) for word in words]
        self.networks = {c.name: c.network for c in contenders}
        shape = common_input(contenders, setting.size)
        self.work = {c.name: self._counted(c, shape) for c in contenders}
        check_outputs(contenders, {name: found.output for name, found in self.work.items()})
        self.reading = Reading(shape=shape, classes=self.work[words[0]].output[-1])
        self.rates: Rates | None = None
        self.rows: list[Row] = []
        self.compile_seconds: float | None = None  # of all cases, beforehand, in several processes
        self.paths: dict[tuple[str, Mode, str], Path] = {}  # files of networks, by name, mode and form
        self.unformed: dict[str, str] = {}  # why a network has no form for inference
        self.largest: dict[str, int | str] = {}  # the largest batch that fits, or why the search failed

    # ------------------------------------------------------------ preparing

    def _counted(self, contender: Candidate, shape: Shape) -> Work:
        batch = (self.setting.images, *shape)
        try:
            return work(contender.network, batch, train=self.setting.train)
        except RUN_ERRORS as error:
            raise ValueError(
                f"bench: {contender.name!r} can't take a batch of shape {batch}: {reason(error)}. Give another --size "
                "or --batch."
            ) from error

    def cases(self) -> list[list[Case]]:
        """What is timed, in groups whose rounds are interleaved: training and inference, eager and compiled."""
        groups = []
        for mode in ("train", "infer"):
            for compiled in (False, True):
                if getattr(self.setting, mode) and (self.setting.compiled if compiled else self.setting.eager):
                    keys = [key for key in self.paths if key[1] == mode]
                    groups.append([Case(network=n, mode=m, compiled=compiled, form=f) for n, m, f in keys])
        return groups

    def save(self, folder: Path, forms: dict[str, dict[str, Path] | str]) -> None:
        """Puts the networks as files where workers find them, beside their forms for inference."""
        for i, word in enumerate(self.words):
            if self.setting.train:
                path = self.paths[word, "train", AS_TRAINED] = folder / f"{i}-train.pt"
                torch.save(self.networks[word], path)
            made = forms.get(word, {})
            if isinstance(made, str):
                self.unformed[word] = made
                made = {AS_TRAINED: folder}  # a row that says so
            for form, path in made.items():
                if form not in self.without:
                    self.paths[word, "infer", form] = path

    def failure(self, case: Case) -> str:
        """Why it can't be timed, if that is known."""
        return self.unformed.get(case.network, "") if case.mode == "infer" else ""

    def jobs(self) -> list[Job]:
        """The cases to compile."""
        cases = [case for group in self.cases() for case in group if case.compiled and not self.failure(case)]
        paths = [self.paths[case.network, case.mode, case.form] for case in cases]
        threads = self.setting.threads or torch.get_num_threads()
        return [
            Job(case=case, path=path, reading=self.reading, setting=self.setting, threads=threads)
            for case, path in zip(cases, paths, strict=True)
        ]

    # ------------------------------------------------------------ running

    def run(self, written: Callable[[], None] = lambda: None) -> None:
        """Times all cases; calls `written` whenever there is something new."""
        with tempfile.TemporaryDirectory() as folder:
            if not self.paths:
                prepare([self], Path(folder))
            with tuned(self.setting):
                self.say("measuring what this device reaches")
                self.rates = measure_rates(self.setting.where, self.setting.dtype)
                for group in self.cases():
                    self._run_group(group, written)
                if self.setting.fit:
                    for word in self.words:
                        self.say(f"{word}: searching for the largest batch")
                        self.largest[word] = self._largest_batch(word)
                        written()

    def _run_group(self, group: list[Case], written: Callable[[], None]) -> None:
        runners: list[Runner] = []
        try:
            for case in group:
                row = Row(case=case, error=self.failure(case))
                self.rows.append(row)
                try:
                    if not row.error:
                        runners.append(self._ready(case, row))
                except Exception as error:  # one network that fails must not take the others with it
                    row.error = cause(error)
                    self.say(f"{case}: {row.error}")
                written()
            for i in range(self.setting.rounds):
                self.say(f"{group[0].mode}, {'compiled' if group[0].compiled else 'eager'}: round {i + 1}")
                # Back and forth, so that a drift of the clock favours nobody.
                for runner in list(runners if i % 2 == 0 else reversed(runners)):
                    try:
                        runner.round()
                    except Exception as error:
                        self._row(runner).error = cause(error)
                        runner.rounds.clear()
                        runners.remove(runner)
                        runner.close()
                written()
            for runner in runners:
                self._row(runner).finite = runner.finite()
            written()
        finally:
            while runners:
                runners.pop().close()

    def _row(self, runner: Runner) -> Row:
        return next(row for row in self.rows if row.case == runner.case)

    def _ready(self, case: Case, row: Row) -> Runner:
        self.say(f"{case}: {'compiling' if case.compiled else 'warming up'}")
        network = read(self.paths[case.network, case.mode, case.form])
        batch = (self.setting.images, *self.reading.shape)
        row.work = self.work[case.network] if case.mode == "train" else work(network, batch, train=False)
        runner = Runner(case, network, self.reading, self.setting)
        row.rounds = runner.rounds
        row.first_step, row.memory = runner.first_step, runner.peak()
        if self.setting.graph and self.setting.where.type == "cuda":
            runner.record_graph()
        return runner

    def _largest_batch(self, word: str) -> int | str:
        """By eager steps, from two images on: a compiled one is compiled for one batch."""
        case = Case(network=word, mode="train", compiled=False)
        try:
            network = read(self.paths[word, "train", AS_TRAINED])
            runner = Runner(case, network, self.reading, dataclasses.replace(self.setting, batch=2))
            try:
                return runner.largest_batch(self.setting.fit)
            finally:
                runner.close()
        except Exception as error:
            return cause(error)

    # ------------------------------------------------------------ results

    @property
    def failed(self) -> list[str]:
        """What went wrong, a line each."""
        rows = [f"{row.case}: {row.error}" for row in self.rows if row.error]
        return rows + [
            f"{word}, the largest batch: {why}" for word, why in self.largest.items() if isinstance(why, str)
        ]

    @property
    def begun(self) -> bool:
        """Whether there is anything to show: a first round, or a network that failed."""
        return any(row.rounds or row.error for row in self.rows)

    def reference(self, row: Row) -> Row | None:
        """The first network's best row of the same kind, which others are compared with."""
        kind = (row.case.mode, row.case.compiled)
        rows = [r for r in self.rows if r.rounds and (r.case.mode, r.case.compiled) == kind]
        own = [r for r in rows if r.case.network == self.words[0]]
        return max(own, key=lambda r: r.images_per_s or 0.0, default=None)

    def ratios(self, row: Row) -> dict[str, float | None]:
        """Images a second and memory, over those of the first network."""
        first = self.reference(row)
        if first is None or not row.rounds:
            return {"speed": None, "memory": None}
        assert row.images_per_s is not None
        assert first.images_per_s is not None
        memory = row.memory / first.memory if row.memory and first.memory else None
        return {"speed": row.images_per_s / first.images_per_s, "memory": memory}

    def to_dict(self) -> dict[str, Any]:
        """Everything that was set and found, for JSON."""
        device = self.setting.where
        gpu = device.type == "cuda"
        return {
            "networks": [self._about(word) for word in self.words],
            "setting": {**dataclasses.asdict(self.setting), "device": str(device), "batch": self.setting.images},
            "input": list(self.reading.shape),
            "machine": {
                "device": torch.cuda.get_device_name(device) if gpu else platform.processor() or platform.machine(),
                "torch": torch.__version__,
                "timm": timm.__version__,
                "python": platform.python_version(),
                "cudnn": torch.backends.cudnn.version() if gpu else None,
                "threads": torch.get_num_threads(),
                "tf32": torch.backends.cudnn.allow_tf32 if gpu else None,
            },
            "rates": None if self.rates is None else {"flops": self.rates.flops, "bytes": self.rates.bytes},
            "compile_seconds": self.compile_seconds,
            "rows": [self._line(row) for row in self.rows],
        }

    def _about(self, word: str) -> dict[str, Any]:
        network = self.networks[word]
        return {
            "name": word,
            "trained": sum(p.numel() for p in network.parameters() if p.requires_grad),
            "frozen": frozen_weights(network),
            "largest_batch": found if isinstance(found := self.largest.get(word), int) else None,
        }

    def _line(self, row: Row) -> dict[str, Any]:
        line: dict[str, Any] = dataclasses.asdict(row.case)
        found = row.images_per_s
        line |= {
            "images_per_s": found,
            "low": min(row.rounds, default=None),
            "high": max(row.rounds, default=None),
            "rounds": row.rounds,
            "milliseconds": None if found is None else 1e3 * self.setting.images / found,
            "memory_bytes": row.memory,
            "ratio": self.ratios(row),
            "first_step_seconds": row.first_step,
            "finite": row.finite,
            "error": row.error,
        }
        if row.work is not None:
            line["macs"] = row.work.macs // self.setting.images
            line["numbers_moved"] = row.work.numbers
            if self.rates is not None:
                arithmetic, traffic = row.work.floors(self.rates, self.setting.dtype.itemsize)
                line["floor_milliseconds"] = {"arithmetic": 1e3 * arithmetic, "traffic": 1e3 * traffic}
        return line


def prepare(comparisons: Sequence[Comparison], folder: Path) -> None:
    """Folds and, where their setting has workers, compiles all cases of all comparisons beforehand, several at once."""
    first = comparisons[0]
    workers = first.setting.compile_workers
    inferring = list(
        dict.fromkeys(word for c in comparisons if c.setting.infer for word in c.words if word not in c.train_only)
    )
    first.say("folding")
    forms = make_forms(inferring, folder, folded=first.setting.fold, workers=workers)
    for i, comparison in enumerate(comparisons):
        own = folder / str(i)
        own.mkdir()
        comparison.save(own, {word: forms[word] for word in comparison.words if word in forms})
    if not workers:
        return
    jobs = [job for comparison in comparisons for job in comparison.jobs()]
    # The longest first, so that none of them is left alone at the end: training of the network with most layers.
    layers = {word: len(list(net.modules())) for c in comparisons for word, net in c.networks.items()}
    jobs.sort(key=lambda job: (job.case.mode == "train", layers[job.case.network]), reverse=True)
    began = time.perf_counter()
    left = len(jobs)

    def done(result: Any) -> None:
        nonlocal left
        left -= 1
        first.say(f"compiled in {result.seconds:.0f} s: {result.case} {result.error}; {left} left")

    compile_ahead(jobs, workers, done)
    for comparison in comparisons:
        comparison.compile_seconds = time.perf_counter() - began
