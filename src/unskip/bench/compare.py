"""The comparison: models side by side in one process, rounds interleaved."""

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
from unskip.bench.compiling import compile_ahead, make_forms, read, short_error
from unskip.bench.floor import DeviceRates, Work, measure_rates, work
from unskip.bench.networks import AS_TRAINED, Candidate, check_outputs, common_input, load_candidates, own_layers
from unskip.bench.runner import Runner, Task, tuned
from unskip.bench.setting import Case, Mode, Setting
from unskip.io.load import Shape
from unskip.models.about import frozen_weights

Say = Callable[[str], None]


@dataclasses.dataclass(kw_only=True)
class BenchRow:
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
    """Two or more models under one setting. `run` fills `rows`; they can be read at any moment, also after Ctrl-C."""

    def __init__(self, model_specs: Sequence[str], setting: Setting, say: Say = lambda _: None) -> None:
        if len(model_specs) < 2:
            raise ValueError(
                f"bench: a comparison needs two networks or more, and {' '.join(model_specs) or 'none'} was all; add "
                "another name, for instance pnnh_resnet34 beside resnet34."
            )
        if len(set(model_specs)) < len(model_specs):
            raise ValueError(f"bench: a network is named twice in {', '.join(model_specs)}; name each once.")
        self.setting, self.say, self.first = setting, say, model_specs[0]
        # Fast layers run as the ordinary ones on a CPU: there is nothing to add there.
        beside = setting.layers == "same" and setting.where.type == "cuda"
        self.candidates = load_candidates(model_specs, setting.layers, beside=beside)
        shape = common_input(self.candidates, setting.size)
        self.work = {c.name: self._count(c, (setting.images, *shape)) for c in self.candidates}
        check_outputs(self.candidates, {name: found.output for name, found in self.work.items()})
        self.task = Task(shape=shape, classes=self.work[self.first].output[-1])
        self.rates: DeviceRates | None = None
        self.rows: list[BenchRow] = []
        self.compile_seconds: float | None = None  # of all cases, beforehand, in several processes
        self.paths: dict[tuple[str, Mode, str], Path] = {}  # files of models, by name, mode and form
        self.without_forms: dict[str, str] = {}  # why a model has no form for inference
        self.largest: dict[str, int | str] = {}  # the largest batch that fits, or why the search failed

    def _count(self, candidate: Candidate, batch: Shape) -> Work:
        try:
            return work(candidate.model, batch, train=self.setting.train)
        except RUN_ERRORS as error:
            raise ValueError(
                f"bench: {candidate.name!r} can't take a batch of shape {batch}: {reason(error)}. Give another --size "
                "or --batch."
            ) from error

    def cases(self) -> list[list[Case]]:
        """What is timed, in groups whose rounds are interleaved: training and inference, eager and compiled."""
        ways = {False: self.setting.eager, True: self.setting.compiled}
        groups = [
            [Case(network=n, mode=m, compiled=compiled, form=f) for n, m, f in self.paths if m == mode]
            for mode in ("train", "infer")
            for compiled, wanted in ways.items()
            if wanted
        ]
        return [group for group in groups if group]

    def _failure(self, case: Case) -> str:
        """Why a case can't be timed, if that is known."""
        return self.without_forms.get(case.network, "") if case.mode == "infer" else ""

    # ------------------------------------------------------------ running

    def run(self, changed: Callable[[], None] = lambda: None) -> None:
        """Times all cases; calls `changed` whenever there is something new."""
        with tempfile.TemporaryDirectory() as folder:
            self._save(Path(folder))
            if self.setting.compile_workers:
                self._compile_ahead()
            with tuned(self.setting):
                self.say("measuring what this device reaches")
                self.rates = measure_rates(self.setting.where, self.setting.dtype)
                for group in self.cases():
                    self._run_group(group, changed)
                for candidate in self.candidates if self.setting.fit else []:
                    self.say(f"{candidate.name}: searching for the largest batch")
                    self.largest[candidate.name] = self._largest_batch(candidate.name)
                    changed()

    def _save(self, folder: Path) -> None:
        """Writes the models and their forms for inference to files, where workers find them."""
        files = {candidate.name: folder / f"{i}.pt" for i, candidate in enumerate(self.candidates)}
        for candidate in self.candidates:
            torch.save(candidate.model, files[candidate.name])
        if self.setting.train:
            self.paths = {(name, "train", AS_TRAINED): path for name, path in files.items()}
        if self.setting.infer:
            self.say("folding")
            sizes = {candidate.name: candidate.input_size for candidate in self.candidates}
            made = make_forms(files, sizes, folded=self.setting.fold, workers=self.setting.compile_workers)
            for name, forms in made.items():
                if isinstance(forms, str):
                    self.without_forms[name] = forms
                    forms = {AS_TRAINED: files[name]}  # for a row that says so
                self.paths |= {(name, "infer", form): path for form, path in forms.items()}

    def _compile_ahead(self) -> None:
        cases = [case for group in self.cases() for case in group if case.compiled and not self._failure(case)]
        # The longest first, so that none of them is left alone at the end: training of the model with most layers.
        layers = {c.name: len(list(c.model.modules())) for c in self.candidates}
        cases.sort(key=lambda case: (case.mode == "train", layers[case.network]), reverse=True)
        began = time.perf_counter()
        for message in compile_ahead({case: self._path(case) for case in cases}, self.task, self.setting):
            self.say(message)
        self.compile_seconds = time.perf_counter() - began

    def _path(self, case: Case) -> Path:
        return self.paths[case.network, case.mode, case.form]

    def _run_group(self, group: list[Case], changed: Callable[[], None]) -> None:
        runners: list[tuple[Runner, BenchRow]] = []
        try:
            for case in group:
                row = BenchRow(case=case, error=self._failure(case))
                self.rows.append(row)
                try:
                    if not row.error:
                        runners.append((self._ready(case, row), row))
                except Exception as error:  # one model that fails must not take the others with it
                    row.error = short_error(error)
                    self.say(f"{case}: {row.error}")
                changed()
            for i in range(self.setting.rounds):
                self.say(f"{group[0].mode}, {group[0].how}: round {i + 1}")
                # Back and forth, so that a drift of the clock favours nobody.
                for runner, row in list(runners if i % 2 == 0 else reversed(runners)):
                    try:
                        runner.round()
                    except Exception as error:
                        row.error = short_error(error)
                        row.rounds.clear()
                        runners.remove((runner, row))
                        runner.close()
                changed()
            for runner, row in runners:
                row.finite = runner.finite()
            changed()
        finally:
            while runners:
                runners.pop()[0].close()

    def _ready(self, case: Case, row: BenchRow) -> Runner:
        self.say(f"{case}: {'compiling' if case.compiled else 'warming up'}")
        model = read(self._path(case))
        batch = (self.setting.images, *self.task.shape)
        row.work = self.work[case.network] if case.mode == "train" else work(model, batch, train=False)
        runner = Runner(case, model, self.task, self.setting)
        row.rounds, row.first_step, row.memory = runner.rounds, runner.first_step, runner.peak()
        if self.setting.graph and self.setting.where.type == "cuda":
            runner.record_graph()
        return runner

    def _largest_batch(self, name: str) -> int | str:
        """By eager steps, from two images on: a compiled one is compiled for one batch."""
        case = Case(network=name, mode="train", compiled=False)
        try:
            runner = Runner(case, read(self._path(case)), self.task, dataclasses.replace(self.setting, batch=2))
            try:
                return runner.largest_batch(self.setting.fit)
            finally:
                runner.close()
        except Exception as error:
            return short_error(error)

    # ------------------------------------------------------------ results

    @property
    def failed(self) -> list[str]:
        """What went wrong, one line for each failure."""
        searches = [f"{name}, the largest batch: {why}" for name, why in self.largest.items() if isinstance(why, str)]
        return [f"{row.case}: {row.error}" for row in self.rows if row.error] + searches

    @property
    def begun(self) -> bool:
        """Whether there is anything to show: a first round, or a model that failed."""
        return any(row.rounds or row.error for row in self.rows)

    def _best(self, name: str, like: Case) -> BenchRow | None:
        """The fastest row of a model among those of one mode, eager or compiled."""
        rows = [r for r in self.rows if r.case.network == name and r.rounds]
        rows = [r for r in rows if (r.case.mode, r.case.compiled) == (like.mode, like.compiled)]
        return max(rows, key=lambda r: r.images_per_s or 0.0, default=None)

    def reference(self, row: BenchRow) -> BenchRow | None:
        """The first model's best row of the same mode and with the same layers.

        Form 'dense' has ordinary layers alone, so it is compared with the first model as it was built.
        """
        ordinary = row.case.form == "dense" or row.case.network not in {c.model_spec for c in self.candidates}
        as_built = self._best(own_layers(self.first), row.case)
        return as_built if ordinary and as_built is not None else self._best(self.first, row.case)

    def ratios(self, row: BenchRow) -> dict[str, float | None]:
        """Speed and memory over the first model with the same layers; speed over the first model as it was built."""

        def over(other: BenchRow | None, what: str) -> float | None:
            mine: float | None = getattr(row, what)
            others: float | None = getattr(other, what, None)
            return mine / others if mine and others else None

        same, own = self.reference(row), self._best(own_layers(self.first), row.case)
        return {
            "speed": over(same, "images_per_s"),
            "memory": over(same, "memory"),
            "speed_over_own_layers": over(own, "images_per_s"),
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything that was set and found, for JSON."""
        device = self.setting.where
        gpu = device.type == "cuda"
        return {
            "networks": [self._about(candidate) for candidate in self.candidates],
            "setting": {**dataclasses.asdict(self.setting), "device": str(device), "batch": self.setting.images},
            "input": list(self.task.shape),
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

    def _about(self, candidate: Candidate) -> dict[str, Any]:
        return {
            "name": candidate.name,
            "own_layers": candidate.name == own_layers(candidate.model_spec),
            "fast_layers": list(candidate.fast_layers),
            "trained": sum(p.numel() for p in candidate.model.parameters() if p.requires_grad),
            "frozen": frozen_weights(candidate.model),
            "largest_batch": found if isinstance(found := self.largest.get(candidate.name), int) else None,
        }

    def _line(self, row: BenchRow) -> dict[str, Any]:
        found = row.images_per_s
        line = dataclasses.asdict(row.case) | {
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
            line |= {"macs": row.work.macs // self.setting.images, "numbers_moved": row.work.numbers}
            if self.rates is not None:
                arithmetic, traffic = row.work.floors(self.rates, self.setting.dtype.itemsize)
                line["floor_milliseconds"] = {"arithmetic": 1e3 * arithmetic, "traffic": 1e3 * traffic}
        return line
