"""ExecuTorch: PyTorch's runtime for phones and microcontrollers. The file has XNNPACK's kernels where it has them."""

from dataclasses import dataclass
from importlib.metadata import version
from typing import ClassVar

from unskip._core.errors import reason
from unskip._core.files import write_atomically
from unskip.ship.targets.target import ExportedFor, Job, Target
from unskip.ship.writing import quiet, traced


@dataclass(frozen=True, kw_only=True, eq=False)
class Executorch(Target):
    """A .pte file."""

    name: ClassVar[str] = "executorch"
    suffix: ClassVar[str] = ".pte"
    modules: ClassVar[tuple[str, ...]] = ("executorch.exir", "executorch.runtime")

    def make(self, job: Job) -> ExportedFor:
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower
        from executorch.runtime import Runtime

        program = traced(job.layers, job.one, free=False)
        try:
            with quiet():
                edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
                data = bytes(edge.to_executorch().buffer)
            method = Runtime.get().load_program(data).load_method("forward")
        except Exception as failure:  # of many kinds
            raise ValueError(
                f"export: ExecuTorch can't convert {type(job.model).__name__}: {reason(failure)}."
            ) from failure
        error = job.check(lambda x: method.execute([x])[0].clone())
        write_atomically(job.path, lambda file: file.write(data), command="export")
        return job.result(
            format="executorch", target=self.name, error=error, bytes=len(data),
            ran_by=f"ExecuTorch {version('executorch')}",
        )  # fmt: skip
