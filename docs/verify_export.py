"""Verify an export of `manage.py export_run` with nothing but Python: `python verify_export.py FILE`.

Exit 0 if every row follows the row before it and nothing was altered, added or cut off; else 1.
"""

import hashlib
import json
import sys

HASHED = (
    "seq",
    "run",
    "kind",
    "call_id",
    "tool_name",
    "attempt",
    "epoch",
    "payload",
    "created_at",
    "consumes",
)


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def problems(lines):
    first = next(lines)
    if (first.get("format"), first.get("version")) != ("agentruns-export", 1):
        yield "this is no export of version 1"
        return
    seq, head, hidden = 0, "0" * 64, 0
    for line in lines:
        if "definition" in line:
            if "body" in line and sha256(line["body"]) != line["definition"]:
                yield f"definition {line['definition']} was altered"
            hidden += "body" not in line
            continue
        seq += 1
        if line["seq"] != seq:
            yield f"row {seq} is missing; the next one is {line['seq']}"
            return
        if line["prev_hash"] != head:
            yield f"row {seq} does not follow the row before it"
        if "payload" in line:
            row = {"session": first["session"]["id"], **{name: line[name] for name in HASHED}}
            text = json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            if sha256(line["prev_hash"] + text) != line["hash"]:
                yield f"row {seq} ({line['kind']}) was altered"
        hidden += "payload" not in line
        head = line["hash"]
    if first["head"] != {"seq": seq, "hash": head}:
        yield f"the session ends at row {first['head']['seq']} and its hash, the export at row {seq}"
    print(f"{seq} rows, {hidden} of them and of the definitions redacted (chained, but not recomputable)")


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        found = list(problems(json.loads(line) for line in file if line.strip()))
    print("\n".join(found) or "intact")
    sys.exit(bool(found))
