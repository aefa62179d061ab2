"""Build ``data/definitions.tsv`` from a WordNet 3.0 dictionary folder (Debian: package wordnet-base).

    python -m worker.demo.extract_wordnet /usr/share/wordnet worker/demo/data/definitions.tsv

The table is part of the project; this script only documents where it came from. WordNet's licence is in NOTICE.
"""

import re
import sys
from pathlib import Path

COUNT = 2500
LONGEST = 72  # characters of a definition: what a small model can keep word for word
UNSUITABLE = frozenset(  # words a demo should not volunteer, or whose first sense surprises
    "ass assault bitch bomb bomber breast corpse drug gun gunfire hell intercourse killer killing murder murderer nazi "
    "negro nigger procreation prostitute rape sex slave slavery suicide torture whore".split()
)


def main(dictionary: Path, out: Path) -> None:
    """Write the commonest single-word nouns with the first clause of their first sense."""
    glosses: dict[str, str] = {}
    for line in (dictionary / "data.noun").read_text(encoding="utf-8").splitlines():
        if not line.startswith(" "):
            glosses[line[:8]] = line.split(" | ", 1)[1]
    frequency: dict[str, int] = {}
    for line in (dictionary / "cntlist.rev").read_text(encoding="utf-8").splitlines():
        key, _, count = line.split()
        lemma, _, sense = key.partition("%")
        if sense.startswith("1:"):
            frequency[lemma] = frequency.get(lemma, 0) + int(count)
    found: dict[str, str] = {}
    lines = [line for line in (dictionary / "index.noun").read_text(encoding="utf-8").splitlines() if line[0] != " "]
    for line in sorted(lines, key=lambda line: (-frequency.get(line.split()[0], 0), line)):
        cells = line.split()
        lemma, pointers, senses = cells[0], int(cells[3]), int(cells[2])
        first = cells[4 + pointers + 2 : 4 + pointers + 2 + senses][0]
        gloss = _clean(glosses[first])
        if re.fullmatch(r"[a-z]{3,12}", lemma) and 12 <= len(gloss) <= LONGEST and not _unusable(lemma, gloss):
            found[lemma] = gloss
        if len(found) == COUNT:
            break
    rows = [f"{lemma}\t{gloss}" for lemma, gloss in sorted(found.items())]
    out.write_text("# WordNet 3.0, Princeton University: see NOTICE\n" + "\n".join(rows) + "\n", encoding="utf-8")


def _clean(gloss: str) -> str:
    """Keep the definition: drop examples, remarks in brackets and second clauses."""
    text = re.sub(r"\([^)]*\)", "", gloss.split('"')[0]).split(";")[0]
    return re.sub(r"\s+", " ", text).strip(" ,.:")


def _unusable(lemma: str, gloss: str) -> bool:
    return lemma in gloss.split() or lemma in UNSUITABLE or not re.fullmatch(r"[a-zA-Z ,'\-]+", gloss)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
