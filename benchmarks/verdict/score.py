"""The score: the committed rules on the second list, which nothing was set by. Run once.

python benchmarks/verdict/score.py OUT/fates.json [--out OUT/score.md] [--measured OUT/score_measured.json]
"""

import json

from networks import RESERVE, SCORE, SECOND
from tune import arguments, table, write


def main() -> None:
    given = arguments(__doc__, lists=["score", "second"])
    fates = json.loads(given.fates.read_text())[given.list]
    known = SECOND if given.list == "second" else SCORE | RESERVE
    group = {name: candidate for name, candidate in known.items() if name in fates}
    lines, data, right = table(group, fates)
    lines += ["", f"{right} of {len(data)} right."]
    print(lines[-1])
    write(given.out, given.measured, lines, data)


if __name__ == "__main__":
    main()
