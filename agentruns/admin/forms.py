"""What people may send: a decision on a card, a resume, a cancel, a verdict."""

from __future__ import annotations

from typing import Any

from django import forms
from django.utils.translation import gettext_lazy as _

REASON_LENGTH = 2000
RESULT_LENGTH = 100_000
ANSWER_LENGTH = 20_000
WHY_DENIED = _("A denial needs a reason: the model is told it and does not ask again.")


class TypedField(forms.CharField):
    """Text as it was typed: browsers send other line ends."""

    def to_python(self, value: Any) -> str:
        """Return the text with its own line ends, before its length is judged."""
        return str(super().to_python(value)).replace("\r\n", "\n")


def _reason(label: Any, **options: Any) -> TypedField:
    area = forms.Textarea(attrs={"class": "vLargeTextField", "rows": 3})
    return TypedField(label=label, max_length=REASON_LENGTH, widget=area, **options)


class ApproveForm(forms.Form):
    """Approve exactly what was shown: the digest says what that was."""

    digest = forms.CharField(max_length=64, widget=forms.HiddenInput)
    reason = _reason(_("Note, kept in the journal (optional)"), required=False)


class DenyForm(forms.Form):
    """Deny what was shown; the model is told why."""

    digest = forms.CharField(max_length=64, widget=forms.HiddenInput)
    reason = _reason(
        _("Reason, told to the model"),
        error_messages={"required": WHY_DENIED},
    )


class BulkApproveForm(forms.Form):
    """Approve each of several."""

    reason = _reason(_("Note, kept in the journal of each (optional)"), required=False)


class BulkDenyForm(forms.Form):
    """Deny each of several; the models are told why."""

    reason = _reason(_("Reason, told to the model of each"), error_messages={"required": WHY_DENIED})


class AnswerForm(forms.Form):
    """Answer in place of the call: the model gets the text as its result."""

    digest = forms.CharField(max_length=64, widget=forms.HiddenInput)
    text = TypedField(
        strip=False,
        label=_("Answer, told to the model word for word"),
        max_length=ANSWER_LENGTH,
        widget=forms.Textarea(attrs={"class": "vLargeTextField", "rows": 3}),
        error_messages={"required": _("An answer needs a text: the model gets it as the call's result.")},
    )


class ExtendForm(forms.Form):
    """Give people more time."""

    digest = forms.CharField(max_length=64, widget=forms.HiddenInput)
    seen = forms.CharField(max_length=40, widget=forms.HiddenInput)
    hours = forms.TypedChoiceField(
        label=_("Extend by"),
        coerce=int,
        initial=24,
        choices=[(1, _("1 hour")), (4, _("4 hours")), (24, _("1 day")), (168, _("1 week"))],
    )


class ResumeForm(forms.Form):
    """Resume the run as it was shown: `seq` is the last journal row that the page knew."""

    seq = forms.IntegerField(widget=forms.HiddenInput)


class CancelForm(forms.Form):
    """Cancel a run."""

    reason = _reason(_("Reason, kept in the journal (optional)"), required=False)


class VerdictForm(forms.Form):
    """What became of a call in doubt; `seq` is the last journal row of the call that the page knew."""

    seq = forms.IntegerField(widget=forms.HiddenInput)
    verdict = forms.ChoiceField(
        choices=[(name, name) for name in ("occurred", "not_occurred", "unknown")], widget=forms.HiddenInput
    )
    result = TypedField(
        max_length=RESULT_LENGTH,
        error_messages={"required": _("Say what the tool is to have returned: the model reads it.")},
        widget=forms.Textarea(attrs={"class": "vLargeTextField", "rows": 4, "dir": "ltr"}),
    )
    evidence = TypedField(
        label=_("How you know, kept in the journal"),
        max_length=REASON_LENGTH,
        error_messages={"required": _("Say how you know it: whoever audits this reads it.")},
        widget=forms.Textarea(attrs={"class": "vLargeTextField", "rows": 3}),
    )

    def __init__(self, *args: Any, is_told: bool = False, needs_result: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        verdict = self.initial.get("verdict")
        self.fields["result"].label = _("Kept in the journal as its result (optional)")
        if not is_told:
            self.fields["result"].label = _("Result, told to the model")
        self.fields["result"].required = needs_result and verdict == "occurred"
        self.fields["evidence"].required = is_told or verdict != "unknown"
        if not self.fields["evidence"].required:
            self.fields["evidence"].label = _("Note, kept in the journal (optional)")


class PauseForm(forms.Form):
    """Pause a run."""

    reason = _reason(_("Reason, shown while it is paused (optional)"), required=False)


class AdoptForm(forms.Form):
    """Adopt the definition that was shown, `hash`; `seq` is the last journal row that the page knew."""

    hash = forms.CharField(max_length=64, widget=forms.HiddenInput)
    seq = forms.IntegerField(widget=forms.HiddenInput)
    reason = _reason(_("Reason, kept in the journal (optional)"), required=False)
