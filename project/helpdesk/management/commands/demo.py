"""`manage.py demo`: tell the demo's whole story, in about half a minute."""

from __future__ import annotations

import os
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from project.helpdesk.closing import close
from project.helpdesk.ledger import LedgerError
from project.helpdesk.narrator import Narrator
from project.helpdesk.preparation import prepare
from project.helpdesk.story import DemoError, Story


class Command(BaseCommand):
    help = "Let agents work through six tickets, with two real crashes. Safe to run again."

    def handle(self, *args: Any, **options: Any) -> None:
        narrator = Narrator(self._print, self.style)
        try:
            Story(narrator, prepare()).tell()
            findings = close(narrator)
        except (DemoError, LedgerError) as error:
            raise CommandError(str(error)) from error
        except KeyboardInterrupt:
            raise CommandError("Stopped. Run it again: it continues from there.", returncode=130) from None
        except BrokenPipeError:  # such as `make demo | head`: nobody reads any more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        if findings:
            raise CommandError("\n".join(["The ledger and the journal disagree:", *findings]))

    def _print(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()
