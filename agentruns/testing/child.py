"""A management command in a process of its own, on the databases of the test, that can really be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack

VARIABLE = "AGENTRUNS_TESTING_CHILD"


def manage_py(*arguments: str, crash_at: str = "", timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a management command in a process of its own and wait for its end.

    With `crash_at`, a point as for the function of that name, it is killed there by SIGKILL; AssertionError
    if it was not. It works on the test's databases, with the `scripted_model`s (of turns that are plain
    data) and the effects ledger of this moment; a database that the test may not use is out of its reach
    too. RuntimeError where another process cannot see the test's data.
    """
    env = {name: value for name, value in os.environ.items() if name != "AGENTRUNS_CRASH_AT"}
    if crash_at:
        env["AGENTRUNS_CRASH_AT"] = crash_at
    env[VARIABLE] = json.dumps(_orders())
    command = [sys.executable, "-m", "agentruns.testing.child", *arguments]
    done = subprocess.run(  # noqa: S603 - the test's own command
        command, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    if crash_at and done.returncode != -signal.SIGKILL:
        raise AssertionError(
            f"manage.py {' '.join(arguments)} did not get to {crash_at}; it ended with {done.returncode}.\n"
            f"{done.stdout}{done.stderr}"
        )
    return done


def _require_shared(alias: str) -> None:
    from django.db import connections

    connection = connections[alias]
    if connection.vendor == "sqlite" and connection.is_in_memory_db():  # type: ignore[attr-defined]
        raise RuntimeError(
            f"The test database {alias!r} is in memory, where no other process can see it. Give it a file: "
            f'DATABASES[{alias!r}]["TEST"] = {{"NAME": "test.sqlite3"}} in the settings of your tests.'
        )
    if connection.in_atomic_block:
        raise RuntimeError(
            f"A transaction is open on {alias!r}, and no other process can see what is in it. Use "
            "@pytest.mark.django_db(transaction=True), or TransactionTestCase."
        )


def _orders() -> dict[str, object]:
    from django.db import connections

    from agentruns.testing.script import playing

    # Django blocks the others in a test, and they need not be test databases at all.
    allowed = [alias for alias in connections if not hasattr(connections[alias].connect, "wrapped")]
    for alias in allowed:
        _require_shared(alias)
    return {
        "path": sys.path,
        "names": {alias: str(connections[alias].settings_dict["NAME"]) for alias in allowed},
        "scripts": [[agent.name, agent.version, script.turns] for agent, script in playing],
    }


def main() -> None:
    """Do what the test that started this process ordered."""
    orders = json.loads(os.environ[VARIABLE])
    sys.path += [folder for folder in orders["path"] if folder not in sys.path]
    import django
    from django.conf import settings
    from django.core.management import execute_from_command_line

    for alias, database in settings.DATABASES.items():
        if alias in orders["names"]:
            database["NAME"] = orders["names"][alias]
        else:
            database["ENGINE"] = "django.db.backends.dummy"
    django.setup()

    from agentruns.agents.agent import get_agent
    from agentruns.testing.script import scripted_model

    with ExitStack() as stack:
        for name, version, turns in orders["scripts"]:
            stack.enter_context(scripted_model(get_agent(name, version), turns))
        execute_from_command_line(["manage.py", *sys.argv[1:]])


if __name__ == "__main__":
    main()
