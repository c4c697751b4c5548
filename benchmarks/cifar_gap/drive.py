"""One stretch of a queue on a machine that is there for minutes only: compile, go on, train until the time is up, pack.

    python jobs4.py ladder > queue.json
    python drive.py queue.json --data DATA --out OUT --seconds 540 [--resume FOLDER] [--slots 8]

OUT gets epochs.jsonl and results.jsonl while networks train, and at the end kept.tar.00, kept.tar.01, ...: the states
of paused networks and the weights of jobs with "save", in pieces that a narrow way back lets through; of more than
MOST bytes the states of networks that have come least far are left out, and named. FOLDER holds such pieces of an
earlier stretch and its two logs, which are continued: its networks go on, and the finished ones are not run again.
Where the machine is still there for the next stretch, --stay HERE keeps all states in a folder, however large.
`--seconds` counts from the start of this script, and no epoch is begun that would end later.
`python drive.py --unpack FOLDER TARGET` gets states and weights out of the pieces.
"""

import argparse
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
PIECE = 15 * 2**20  # bytes
MOST = 4 * PIECE
RESERVE = 12  # seconds for test errors and packing, after the last epoch


def pack(folder: Path, out: Path) -> list[Path]:
    """The .pt files of a folder as one archive of at most MOST bytes, in pieces of PIECE bytes.

    Where not all fit, weights of finished networks go first, then states of paused ones, by their epochs in
    out/epochs.jsonl, most first.
    """
    epochs = {row["name"]: row["epoch"] for row in map(json.loads, (out / "epochs.jsonl").read_text().splitlines())}

    def turn(file: Path) -> tuple[bool, int, str]:
        return file.name.endswith(".state.pt"), -epochs.get(file.name.removesuffix(".state.pt"), 0), file.name

    archive, left_out = io.BytesIO(), []
    room = MOST - 2 * tarfile.RECORDSIZE  # what closes an archive
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for file in sorted(folder.glob("*.pt"), key=turn):
            size = file.stat().st_size + 4 * tarfile.BLOCKSIZE  # two headers, times, padding
            if size > room:
                left_out.append(file.name)
                continue
            room -= size
            tar.add(file, file.name)
    if left_out:
        print(f"More than the {MOST / 2**20:.0f} MiB that fit, so left out (states start anew):", *left_out, flush=True)
    data = archive.getvalue()
    assert len(data) <= MOST
    pieces = [out / f"kept.tar.{i:02d}" for i in range(-(-len(data) // PIECE))]
    for i, piece in enumerate(pieces):
        piece.write_bytes(data[i * PIECE : (i + 1) * PIECE])
    return pieces


def unpack(folder: Path, target: Path) -> list[str]:
    """The files that were packed into the pieces in a folder."""
    data = b"".join(piece.read_bytes() for piece in sorted(folder.glob("kept.tar.*")))
    target.mkdir(parents=True, exist_ok=True)
    if not data:
        return []
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(target, filter="data")
        return tar.getnames()


def left_of(queue: list[dict], results: Path) -> list[dict]:
    """The jobs that an earlier stretch has not finished."""
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    ended = {row["name"] for row in rows if row["status"] in ("done", "diverged")}
    return [job for job in queue if job["name"] not in ended]


def main() -> None:
    start = time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queue", type=Path, nargs="?")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--stay", type=Path, help="a folder of this machine where all states are kept and found")
    parser.add_argument("--mode", default="fused")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--unpack", nargs=2, type=Path, metavar=("FOLDER", "TARGET"))
    args = parser.parse_args()
    if args.unpack:
        print(*unpack(*args.unpack), sep="\n")
        return
    jobs = json.loads(args.queue.read_text())
    with tempfile.TemporaryDirectory() as temporary:
        work, states = Path(temporary) / "work", Path(temporary) / "states"
        if args.resume:
            print("going on with", *unpack(args.resume, states), flush=True)
            jobs = left_of(jobs, args.resume / "results.jsonl")
        if args.stay and args.stay.exists():
            shutil.copytree(args.stay, states, dirs_exist_ok=True)  # these are the later ones
        queue = Path(temporary) / "queue.json"
        queue.write_text(json.dumps(jobs))
        args.out.mkdir(parents=True, exist_ok=True)
        work.mkdir()
        for log in ("epochs.jsonl", "results.jsonl"):
            earlier = args.resume / log if args.resume else None
            (args.out / log).write_text(earlier.read_text() if earlier and earlier.exists() else "")
            (work / log).symlink_to((args.out / log).resolve())  # so that they are there whatever happens
        until = start + args.seconds - RESERVE
        if args.device == "cuda":
            subprocess.run([sys.executable, HERE / "warm.py", queue], check=True)
        command = [sys.executable, HERE / "engine.py", "--data", args.data, "--out", work, "--queue", queue]
        command += ["--slots", str(args.slots), "--until", str(until), "--mode", args.mode, "--device", args.device]
        command += ["--once", *(["--resume", states] if states.exists() else [])]
        ended = subprocess.run(list(map(str, command)))
        for job in left_of(jobs, args.out / "results.jsonl"):
            state = f"{job['name']}.state.pt"
            if (states / state).exists() and not (work / state).exists():  # its turn did not come
                (states / state).rename(work / state)
        if args.stay:
            shutil.copytree(work, args.stay, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.jsonl"))
        pieces = pack(work, args.out)
    size = sum(piece.stat().st_size for piece in pieces) / 2**20
    print(f"{time.time() - start:.0f} s in all, {len(pieces)} pieces of together {size:.1f} MiB", flush=True)
    subprocess.run([sys.executable, HERE / "report.py", args.out])
    sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
