"""The README's own code, in a project made this minute."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.programs import ROOT, run_program

README = (ROOT / "README.md").read_text()


def manage(folder: Path, *arguments: str, code: int = 0) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DJANGO", "AGENTRUNS"))}
    return run_program(sys.executable, "manage.py", *arguments, code=code, cwd=folder, env=env).stdout


def test_ten_lines_add_an_agent_to_a_new_project(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "django", "startproject", "site_", tmp_path], check=True)
    manage(tmp_path, "startapp", "shop")
    (code,) = re.findall(r"```python\n(# shop/agents\.py\n.*?)```", README, re.DOTALL)
    (tmp_path / "shop" / "agents.py").write_text(code)
    settings = tmp_path / "site_" / "settings.py"
    assert len(re.findall(r"^.*\S", code, re.MULTILINE)) <= 1 + 10, "its name, and ten lines"
    (database,) = re.findall(r"```python\n# settings\.py\n(.*?)```", README, re.DOTALL)
    settings.write_text(f'{settings.read_text()}\nINSTALLED_APPS += ["agentruns", "shop"]\n{database}')
    manage(tmp_path, "makemigrations", "--check", "--dry-run", "agentruns")
    manage(tmp_path, "migrate")
    assert "no issues (0 silenced)" in manage(tmp_path, "check", "--database", "default")

    small, large = (
        [part.strip('"') for part in re.findall(r'"[^"]*"|\S+', command)]
        for command in re.findall(r"\$ python manage\.py (run_agent [^\n]*)", README)
    )
    for _ in range(2):  # the same command again is the same run
        assert "Refunded." in manage(tmp_path, *small)
    (told,) = re.findall(r'write `("cents": \d+_\d+)` into the script', README)
    (tmp_path / "shop" / "agents.py").write_text(code.replace('"cents": 500', told))
    assert "Waits for a person" in manage(tmp_path, *large, code=3)
    assert manage(tmp_path, "list_runs").count("completed") == 1
