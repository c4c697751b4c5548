"""What `unskip doctor` checks before it measures anything."""

from pathlib import Path

import pytest

from unskip.doctor import examine as module
from unskip.doctor.examine import InputSpec, check_report_path, examine


def test_a_page_that_is_there_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.html"
    check_report_path(file, force=False)
    file.write_text("old")
    with pytest.raises(ValueError, match=r"is there already\. Choose another --out, or overwrite it with --force\."):
        check_report_path(file, force=False)
    check_report_path(file, force=True)
    with pytest.raises(ValueError, match="is a folder; name a file in it"):
        check_report_path(tmp_path, force=True)
    with pytest.raises(ValueError, match=r"the folder .* of --out does not exist"):
        check_report_path(tmp_path / "nowhere" / "report.html", force=False)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ValueError, match=r"nothing can be written into the folder"):
        check_report_path(tmp_path / "other.html", force=False)


@pytest.mark.parametrize(
    ("against", "sentence"),
    [
        ("resnet111", "no network named 'resnet111'"),
        ("tests.doctor.small:number", "gave .int., not an nn.Module"),
        ("tests.doctor.small:odd_vector", "reads inputs of shape .*, which no image has"),
    ],
)
def test_both_networks_are_looked_at_before_the_first_is_measured(
    against: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "diagnose", lambda *args, **kwargs: pytest.fail("measured too early"))
    with pytest.raises(ValueError, match=sentence):
        examine("resnet20", InputSpec(data="digits", batch_size=2), against=against)
