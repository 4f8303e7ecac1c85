"""What people may send: a decision on a card, a resume, a cancel."""

from __future__ import annotations

from typing import Any

from django import forms
from django.utils.translation import gettext_lazy as _

REASON_LENGTH = 2000


def _reason(label: Any, **options: Any) -> forms.CharField:
    area = forms.Textarea(attrs={"class": "vLargeTextField", "rows": 3})
    return forms.CharField(label=label, max_length=REASON_LENGTH, widget=area, **options)


class ApproveForm(forms.Form):
    """Approve exactly what was shown: the digest says what that was."""

    digest = forms.CharField(max_length=64, widget=forms.HiddenInput)
    reason = _reason(_("Note, kept in the journal (optional)"), required=False)


class DenyForm(forms.Form):
    """Deny what was shown; the model is told why."""

    digest = forms.CharField(max_length=64, widget=forms.HiddenInput)
    reason = _reason(
        _("Reason, told to the model"),
        error_messages={
            "required": _("A denial needs a reason: the model is told it and does not ask again.")
        },
    )


class ResumeForm(forms.Form):
    """Resume the run as it was shown: `seq` is the last journal row that the page knew."""

    seq = forms.IntegerField(widget=forms.HiddenInput)


class CancelForm(forms.Form):
    """Cancel a run."""

    reason = _reason(_("Reason, kept in the journal (optional)"), required=False)
