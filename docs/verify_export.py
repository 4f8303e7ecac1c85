"""Verify an export of `manage.py export_run` with nothing but Python: `python verify_export.py FILE`.
Exit 0 if every row follows the row before it and no line was altered, added, moved or cut off; else 1."""

from base64 import b64decode
from hashlib import sha256
from json import dumps, loads
from sys import argv, exit


def problems(lines):
    first, seq, head, hidden, due, files = next(lines), 0, "0" * 64, 0, {}, {}
    definitions, named, runs, whole, end = [], set(), set(), sha256(written(first)), None
    if first.get("format") != "agentruns-export" or first.get("version") not in (1, 2):
        return (yield "this is no export of version 1 or 2")
    for line in lines:
        if end is not None:
            return (yield "there is a line after the last one")
        if "end" in line:
            end = line
            continue
        whole.update(written(line))
        hidden += "redacted" in line
        if "definition" in line:
            definitions.append(line["definition"])
            body = line.get("body", "").encode()
            if "redacted" not in line and sha256(body).hexdigest() != line["definition"]:
                yield f"definition {line['definition']} was altered"
        elif "file" in line:  # a part of what row `of` points at, or why it is not here
            files.setdefault(line["of"], sha256()).update(b64decode(line.get("data", "")))
            if "left_out" in line and due.pop(line["of"], None) and "wrong" in line:
                yield line["left_out"]
        else:
            seq, row = seq + 1, {**line, "session": first["session"]["id"]}
            if line["seq"] != seq:
                return (yield f"row {seq} is missing; the next one is {line['seq']}")
            before, own = row.pop("prev_hash"), row.pop("hash")
            text = head + dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            payload = loads(line.get("payload") or line["redacted"])
            if before != head:
                yield f"row {seq} does not follow the row before it"
            elif "payload" in line and sha256(text.encode()).hexdigest() != own:
                yield f"row {seq} ({line['kind']}) was altered"
            elif "payload" in line and payload.get("stored"):
                due[seq] = payload["stored"]["sha256"]
            if line["kind"] in ("run_started", "run_adopted"):
                named |= {payload[name] for name in ("definition", "old", "new") if payload.get(name)}
            runs.add(line["run"])
            head = own
    wrong = [row for row in due if files.get(row, sha256()).hexdigest() != due[row]]
    yield from (f"the file of row {row} is missing or was altered" for row in wrong)
    if sorted(definitions) != sorted(named):
        yield "the definitions are not exactly those that the rows name, each once"
    if first["run"] not in runs:
        yield f"no row is of run {first['run']}, of which this says to be the export"
    if first["head"] != {"seq": seq, "hash": head}:
        yield f"the session ends at row {first['head']['seq']} and its hash, the export at row {seq}"
    if (end is None) != (first["version"] == 1) or (end and end != {"end": whole.hexdigest()}):
        yield "the last line, with the hash of all others, is missing or does not fit them"
    print(f"{seq} rows, {hidden} of them and of the definitions redacted (chained, but not recomputable)")
    if files:
        print(f"{len(due)} files, and {len(files.keys() - due.keys())} that were left out")


def written(line):
    return dumps(line, sort_keys=True).encode() + b"\n"


if __name__ == "__main__":
    with open(argv[1], encoding="utf-8") as file:
        found = list(problems(map(loads, filter(str.strip, file))))
    print("\n".join(found) or "intact")
    exit(bool(found))
