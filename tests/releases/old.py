"""A process of an older release on the test's database, which does one thing for each line it is told."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    """Answer each line, [what, argument ...], by one line."""
    import django

    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    django.setup()
    import agentruns
    from agentruns import start_run
    from agentruns.journal.verify import problems
    from agentruns.models import Run
    from agentruns.services.sweep import sweep
    from tests.releases import agents

    declared = agents.declare()

    def started(name: str, key: str) -> str:
        return str(start_run(declared[name], "Refund A1", key, idempotency_key=key).pk)

    def swept() -> dict[str, str]:
        sweep()
        return dict(Run.objects.values_list("session__key", "status"))

    def wrong() -> list[str]:
        sessions = Run.objects.order_by("session").values_list("session", flat=True).distinct()
        return [each for session in sessions for each in problems(session)]

    does: dict[str, Any] = {"start": started, "sweep": swept, "problems": wrong}
    print(json.dumps(str(agentruns.__file__)), flush=True)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        print(json.dumps(does[what](*arguments)), flush=True)


if __name__ == "__main__":
    main()
