"""Verify an export of `manage.py export_run` with nothing but Python: `python verify_export.py FILE`.
Exit 0 if every row follows the row before it and no row or file was altered, added or cut off; else 1."""

from base64 import b64decode
from hashlib import sha256
from json import dumps, loads
from sys import argv, exit


def problems(lines):
    first, seq, head, hidden, due, files = next(lines), 0, "0" * 64, 0, {}, {}
    if (first.get("format"), first.get("version")) != ("agentruns-export", 1):
        return (yield "this is no export of version 1")
    for line in lines:
        hidden += "redacted" in line
        if "definition" in line:
            if "body" in line and sha256(line["body"].encode()).hexdigest() != line["definition"]:
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
            if before != head:
                yield f"row {seq} does not follow the row before it"
            elif "payload" in line and sha256(text.encode()).hexdigest() != own:
                yield f"row {seq} ({line['kind']}) was altered"
            elif stored := loads(line.get("payload", "{}")).get("stored"):
                due[seq] = stored["sha256"]
            head = own
    wrong = [row for row in due if files.get(row, sha256()).hexdigest() != due[row]]
    yield from (f"the file of row {row} is missing or was altered" for row in wrong)
    if first["head"] != {"seq": seq, "hash": head}:
        yield f"the session ends at row {first['head']['seq']} and its hash, the export at row {seq}"
    print(f"{seq} rows, {hidden} of them and of the definitions redacted (chained, but not recomputable)")
    if files:
        print(f"{len(due)} files, and {len(files.keys() - due.keys())} that were left out")


if __name__ == "__main__":
    with open(argv[1], encoding="utf-8") as file:
        found = list(problems(map(loads, filter(str.strip, file))))
    print("\n".join(found) or "intact")
    exit(bool(found))
