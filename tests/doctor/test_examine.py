"""What `unskip doctor` checks before it measures anything."""

from pathlib import Path

import pytest

from unskip.doctor.examine import check_report_path


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
