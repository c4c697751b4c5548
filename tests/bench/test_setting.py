"""What a comparison is set to, and what it refuses."""

import pytest

from unskip.bench import Setting, parse_bytes


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("8GiB", 8 * 2**30), ("500 MB", 500_000_000), ("1.5kib", 1536), ("1e9", 10**9), ("12b", 12), (".5kb", 500)],
)
def test_amounts_of_memory(text: str, bytes_: int) -> None:
    assert parse_bytes(text) == bytes_


@pytest.mark.parametrize("text", ["", "0", "0GiB", "8 G", "GiB", "1.2.3GiB", "-1MB", "8XiB", ".", ".GiB", "1e999"])
def test_what_is_no_amount_of_memory(text: str) -> None:
    with pytest.raises(ValueError, match="is no amount of memory; write it like"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"precision": "fp8"}, "precision='fp8' must be one of fp32, bf16"),
        ({"device": "tpu"}, "device='tpu' must be"),
        ({"batch": -1}, "batch=-1 must be between 0 and"),
        ({"rounds": 0}, "rounds=0 must be between 1 and"),
        ({"seconds": 0.0}, "seconds=0.0 must be between 1e-06 and 3,600"),
        ({"seconds": float("inf")}, "seconds=inf must be between"),
        ({"layers": "slow"}, "layers='slow' must be one of same, fast, own"),
        ({"threads": 10**7}, "threads=10000000 must be between 0 and"),
        ({"fit": 2**30, "train": False}, "training is left out; drop --fit, or ask for training too with --train"),
        ({"fit": 2**60, "device": "cpu"}, r"--fit asks for 1,073,741,824\.0 GiB, and cpu has .* GiB; give less"),
        ({"train": False, "infer": False}, "neither training nor inference"),
        ({"eager": False, "compiled": False}, "neither eager nor compiled"),
    ],
)
def test_bad_settings_are_refused(wrong: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Setting(**wrong)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="sees no GPU"):
        Setting(device="cuda")
