"""Starting a run: an agent that the user may start, its task, files, and a session to continue."""

from __future__ import annotations

from typing import Any

from django import forms
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _, gettext_lazy

from agentruns.admin.base import ReadOnlyAdmin, is_uuid, mask_for, status_of
from agentruns.admin.forms import KeyForm, TypedField, area
from agentruns.admin.html import bare, plain
from agentruns.agents.agent import Agent
from agentruns.content import Input, Text, of_upload
from agentruns.exceptions import AgentRunsError, SessionAccessDeniedError
from agentruns.models import Run
from agentruns.providers.attachments import DEFAULT
from agentruns.services.runs import starting
from agentruns.utils.bounds import NAME_LENGTH, TEXT_LENGTH


class FilesInput(forms.FileInput):
    """A widget for several files."""

    allow_multiple_selected = True


class FilesField(forms.FileField):
    """A field for several files, or none."""

    widget = FilesInput

    def clean(self, data: Any, initial: Any = None) -> list[Any]:
        """Validate each file; raises ValidationError."""
        return [super(FilesField, self).clean(each, initial) for each in data]


class StartForm(KeyForm):
    """The form of a new run: its agent, task, files and session."""

    agent = forms.ChoiceField(label=gettext_lazy("Agent"))
    text = TypedField(label=gettext_lazy("Task"), max_length=TEXT_LENGTH, widget=area(8))
    attached = FilesField(label=gettext_lazy("Pictures and documents (optional)"), required=False)
    session = forms.CharField(
        label=gettext_lazy("Session key (optional)"),
        help_text=gettext_lazy(
            "To continue a session of yours: the agent knows what was said there. Empty starts a new one."
        ),
        required=False,
        max_length=NAME_LENGTH,
    )

    def __init__(self, agents: list[Agent], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = dict.fromkeys(agent.name for agent in agents)
        self.fields["agent"].choices = [(name, plain(name)) for name in names]  # type: ignore[attr-defined]

    def input(self) -> Input:
        """Build the task with its files; raises ContentError, or ValueError for too many bytes."""
        text, files = str(self.cleaned_data["text"]), self.cleaned_data["attached"]
        if sum(file.size for file in files) > DEFAULT.request:
            raise ValueError(_("The files are larger than %(count)s bytes.") % {"count": DEFAULT.request})
        return [Text(text), *map(of_upload, files)] if files else text


def start_view(admin: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Show the form of a new run; a POST queues the run.

    Raises PermissionDenied if the user may start no agent.
    """
    if not (agents := starting.agents_of(request.user)):
        raise PermissionDenied
    page: dict[str, Any] = {"title": _("Start a run"), "template": "start"}
    if request.method != "POST":
        given = {name: request.GET.get(name, "") for name in ("agent", "session")}
        key = request.GET.get("task", "")  # the run whose task fills the form, unless a part is hidden
        last: Run | None = admin.get_queryset(request).filter(pk=key).first() if is_uuid(key) else None
        if last is not None and bare(mask_for(last).run(last).input) == last.input:
            given["text"] = last.input
        return admin.render(request, None, form=StartForm(agents, initial=given), **page)
    form, status = StartForm(agents, request.POST, request.FILES), 400
    why = _("Nothing was started. Correct the form below.")
    if form.is_valid():
        try:
            run = starting.start_run(
                request.user,
                form.cleaned_data["agent"],
                form.input(),
                form.cleaned_data["session"] or None,
                idempotency_key=form.cleaned_data["key"],
            )
        except (AgentRunsError, ValueError) as error:
            why, status = plain(error), status_of(error)
            if isinstance(error, SessionAccessDeniedError):
                text = _("%(why)s Or it is not yours to write in: leave the key empty, or take another.")
                why = text % {"why": why}
        else:
            if run.is_new:
                logged, done = _("Started from the console."), _("Started. A worker picks it up.")
                return admin.done(request, run, logged, done)
            return admin.back(request, run, _("This task was started already."))
    page["had_files"] = bool(request.FILES)
    return admin.render(request, None, form=form, status=status, refusal=why, **page)
