"""Verify an export of `manage.py export_run` with nothing but Python: `python verify_export.py FILE`.
Exit 0 if every row follows the row before it and no line was altered, added, moved or cut off; else 1."""

from base64 import b64decode
from hashlib import sha256
from json import dumps, loads
from sys import argv, exit

PARTS = ("facts", "content")  # of a row; one that is hidden or erased is without its text and its salt
OUTSIDE = {"prev_hash", "hash", *(part + end for part in PARTS for end in ("", "_salt", "_redacted"))}


def problems(lines):
    first, seq, head, hidden, due, files = None, 0, "0" * 64, 0, {}, {}
    definitions, named, runs, whole, last = [], set(), set(), sha256(), b""
    for line in lines:
        whole.update(last)
        last = dumps(line, sort_keys=True).encode() + b"\n"
        if first is None:
            first = line
            if (line.get("format"), line.get("version")) != ("agentruns-export", 3):
                return (yield "this is no export of version 3")
        elif "definition" in line:
            definitions.append(line["definition"])
            if "redacted" not in line and digest(line["body"]) != line["definition"]:
                yield f"definition {line['definition']} was altered"
        elif "file" in line:  # a part of what row `of` points at, or why it is not here
            key = line["of"], line["file"]
            files.setdefault(key, sha256()).update(b64decode(line.get("data", "")))
            if "left_out" in line and due.pop(key, None) and "wrong" in line:
                yield line["left_out"]
        elif "end" not in line:
            seq, row = seq + 1, {n: line[n] for n in {*line} - OUTSIDE} | {"session": first["session"]["id"]}
            if line["seq"] != seq:
                return (yield f"row {seq} is missing; the next one is {line['seq']}")
            text = head + dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            shown = [part for part in PARTS if part in line]
            own = [digest(line[part], line[f"{part}_salt"]) == line[f"{part}_hash"] for part in shown]
            if line["prev_hash"] != head:
                yield f"row {seq} does not follow the row before it"
            elif digest(text) != line["hash"] or not all(own):
                yield f"row {seq} ({line['kind']}) was altered"
            elif stored := loads(line.get("content", "{}")).get("stored"):
                pointed = stored if isinstance(stored, list) else [stored]  # small ones are in the row
                due |= {(seq, one["name"]): one["sha256"] for one in pointed if "name" in one}
            if line["kind"] in ("run_started", "run_adopted"):
                facts = loads(line.get("facts") or line["facts_redacted"])
                named |= {facts[name] for name in ("definition", "old", "new") if facts.get(name)}
            hidden, head, runs = hidden + (len(shown) < 2), line["hash"], runs | {line["run"]}
    wrong = [key for key in due if files.get(key, sha256()).hexdigest() != due[key]]
    yield from (f"the file of row {row} is missing or was altered" for row, _name in wrong)
    if sorted(definitions) != sorted(named):
        yield "the definitions are not exactly those that the rows name, each once"
    if first["run"] not in runs:
        yield f"no row is of run {first['run']}, of which this says to be the export"
    if first["head"] != {"seq": seq, "hash": head}:
        yield f"the session ends at row {first['head']['seq']} and its hash, the export at row {seq}"
    if line != {"end": whole.hexdigest()}:
        yield "the last line, with the hash of all others, is missing or does not fit them"
    print(f"{seq} rows ({hidden} hidden or erased), {len(due)} files ({len({*files} - {*due})} left out)")


def digest(text, salt=""):
    return sha256(bytes.fromhex(salt) + text.encode()).hexdigest()


if __name__ == "__main__":
    with open(argv[1], encoding="utf-8") as file:
        found = list(problems(map(loads, filter(str.strip, file))))
    print("\n".join(found) or "intact")
    exit(bool(found))
