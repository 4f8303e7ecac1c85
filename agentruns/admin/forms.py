"""The forms of decisions, buttons and verdicts, and the form in which a person edits a call's arguments."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from django import forms
from django.utils.translation import gettext_lazy as _

from agentruns.admin.html import bare, plain
from agentruns.models.statuses import Verb, Verdict
from agentruns.utils import ids, json as canonical
from agentruns.utils.bounds import REASON_LENGTH, TEXT_LENGTH

PREFIX = "argument-"  # of the fields of an edit
SHORT = 60  # characters of a text that fits on one line
MOST_ROWS = 12
WHY_DENIED = _("A denial needs a reason: the model is told it and does not ask again.")


class MomentField(forms.DateTimeField):
    """A time that a page showed; refuses a time whose UTC value lies outside the years 1 to 9999."""

    default_error_messages = dict.fromkeys(
        ("required", "invalid"), _("The page does not say what it showed. Open it again.")
    )

    def to_python(self, value: Any) -> datetime | None:
        """Parse the time, and convert it to UTC; None for an empty value. Raises ValidationError."""
        moment: datetime | None = super().to_python(value)
        try:
            return moment and moment.astimezone(UTC)
        except OverflowError:
            raise forms.ValidationError(self.error_messages["invalid"], code="invalid") from None


class TypedField(forms.CharField):
    """A text field that undoes the line ends of browsers, which send CR LF instead of LF."""

    def to_python(self, value: Any) -> str:
        """Replace CR LF by LF before the length is checked."""
        return str(super().to_python(value)).replace("\r\n", "\n")


def area(rows: int = 3, **attributes: str) -> forms.Textarea:
    """Build the widget of a long text."""
    return forms.Textarea(attrs={"class": "vLargeTextField", "rows": rows, **attributes})


def reason_field(label: Any, **options: Any) -> TypedField:
    """Build the field of a reason or a note, of at most REASON_LENGTH characters."""
    return TypedField(label=label, max_length=REASON_LENGTH, widget=area(), **options)


def _asking_why(label: Any, **options: Any) -> type[forms.Form]:
    return type("ReasonForm", (forms.Form,), {"reason": reason_field(label, **options)})


PauseForm = _asking_why(_("Reason, shown while it is paused (optional)"), required=False)
CancelForm = _asking_why(_("Reason, kept in the journal (optional)"), required=False)
EraseForm = _asking_why(_("Reason, kept in the journal"))


class LeaveOutForm(forms.Form):
    """The form to leave out a row of the conversation, or a block of the row."""

    block = forms.IntegerField(label=_("What"), required=False, min_value=0, widget=forms.Select)
    reason = reason_field(_("Reason, kept in the journal (optional)"), required=False)


class KeyForm(forms.Form):
    """A form that starts or sends something new. Its `key` keeps a double click from doing this twice."""

    key = forms.CharField(max_length=64, widget=forms.HiddenInput, initial=ids.uuid7)


class ShownForm(forms.Form):
    """A form for a decision on exactly the call that was shown, identified by the digest."""

    digest = forms.CharField(max_length=64, widget=forms.HiddenInput)


class NoteForm(forms.Form):
    """The form of a note about one or several decisions; a denial `needs` a note, which the model reads."""

    use_required_attribute = False  # another verb with the same field needs no note
    reason = reason_field(
        _("Note, kept in the journal; Deny tells it to the model"),
        required=False,
        error_messages={"required": WHY_DENIED},
    )

    def __init__(
        self,
        *args: Any,
        needs: bool = False,
        verbs: Collection[str] = (Verb.APPROVE, Verb.DENY),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.fields["reason"].required = needs
        if Verb.DENY not in verbs:
            self.fields["reason"].label = _("Note, kept in the journal")
        elif Verb.APPROVE not in verbs:
            self.fields["reason"].label = _("Note, kept in the journal and told to the model")
        self.fields["reason"].widget.attrs |= {"rows": 1, **({"autofocus": True} if needs else {})}


class DecideForm(NoteForm, ShownForm):
    """The form to approve a call, or to deny it with a reason."""


class AnswerForm(ShownForm):
    """The form to answer a call: the model gets the text, or a question's `choice`, as the result."""

    text = TypedField(
        strip=False,
        label=_("Answer, told to the model word for word"),
        max_length=TEXT_LENGTH,
        widget=area(),
        error_messages={"required": _("An answer needs a text: the model gets it as the call's result.")},
    )

    def __init__(self, *args: Any, choices: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.choices = {str(place): choice for place, choice in enumerate(choices)}

    def clean(self) -> dict[str, Any]:
        """Use the choice whose button was pressed. A button sends a number, because a text may be masked."""
        if (chosen := self.data.get("choice", "")) in self.choices:
            self.errors.pop("text", None)
            self.cleaned_data["text"] = self.choices[chosen]
        return self.cleaned_data


class ExtendForm(ShownForm):
    """The form that gives people more time to decide; `seen` is the expiry that the page showed."""

    seen = MomentField(widget=forms.HiddenInput)
    hours = forms.TypedChoiceField(
        label=_("Extend by"),
        coerce=int,
        initial=24,
        choices=[(1, _("1 hour")), (4, _("4 hours")), (24, _("1 day")), (168, _("1 week"))],
    )


class ResumeForm(forms.Form):
    """The form to resume the run as it was shown: `seq` is the last journal row that the page knew."""

    seq = forms.IntegerField(widget=forms.HiddenInput)


class RaiseForm(forms.Form):
    """The form to raise budgets; `labels` are those of the run's budgets, by name."""

    max_steps = forms.IntegerField(min_value=1, max_value=2**31 - 1, required=False)
    token_budget = forms.IntegerField(min_value=1, max_value=2**63 - 1, required=False)
    cost_budget = forms.DecimalField(
        min_value=Decimal("1e-12"), max_digits=24, decimal_places=12, required=False
    )
    deadline = forms.IntegerField(min_value=1, max_value=10**7, required=False)  # minutes
    reason = reason_field(_("Reason, kept in the journal (optional)"), required=False)

    def __init__(self, *args: Any, labels: dict[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in {*self.fields} - {"reason"} if labels else ():
            if name in labels:
                self.fields[name].label = labels[name]
            else:
                del self.fields[name]

    def limits(self) -> dict[str, Any]:
        """Build the limits that were given, in the form of the service."""
        given = {name: each for name, each in self.cleaned_data.items() if each is not None}
        if "deadline" in given:
            given["deadline"] = timedelta(minutes=given["deadline"])
        return given


class VerdictForm(forms.Form):
    """The form of a verdict on a call in doubt; `seq` is the last row of the call that the page knew."""

    use_required_attribute = False  # each of the form's three verdicts needs other fields
    seq = forms.IntegerField(widget=forms.HiddenInput)
    verdict = forms.ChoiceField(choices=[(verdict, verdict) for verdict in Verdict])
    evidence = TypedField(
        label=_("How you know, kept in the journal"),
        max_length=REASON_LENGTH,
        error_messages={"required": _("Say how you know it: whoever audits this reads it.")},
        widget=area(2),
    )
    result = TypedField(
        label=_("Result, told to the model if it happened"),
        max_length=TEXT_LENGTH,
        error_messages={"required": _("Say what the tool should have returned: the model reads it.")},
        widget=area(2, dir="ltr"),
    )

    def __init__(
        self, *args: Any, verdict: str, is_uncleared: bool = False, needs_result: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if is_uncleared:
            self.fields["result"].label = _("Result, kept in the journal (optional)")
        self.fields["result"].required = needs_result and verdict == Verdict.OCCURRED
        self.fields["evidence"].required = is_uncleared or verdict != Verdict.UNKNOWN


class AdoptForm(forms.Form):
    """The form to adopt the definition with this `hash`; `seq` is the last row that the page knew."""

    hash = forms.CharField(max_length=64, widget=forms.HiddenInput)
    seq = forms.IntegerField(widget=forms.HiddenInput)
    reason = reason_field(_("Reason, kept in the journal (optional)"), required=False)


class EditForm(DecideForm):
    """The form to approve with other arguments. An argument in `hidden` has no field and keeps its value.

    If the call no longer `fits` its tool, the arguments may also be sent as the form shows them.
    """

    def __init__(
        self,
        schema: dict[str, Any],
        original: dict[str, Any],
        *args: Any,
        hidden: Collection[str] = (),
        fits: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, verbs=(Verb.APPROVE,), **kwargs)
        self.original, self.fits = original, fits
        for name, value in original.items():
            if name not in hidden:
                self.fields[PREFIX + name] = _field(name, schema, value)
        self.fields["reason"] = self.fields.pop("reason")  # the last one

    @property
    def rows(self) -> list[forms.BoundField]:
        """List the fields of the arguments."""
        return [self[name] for name in self.fields if name.startswith(PREFIX)]

    @property
    def arguments(self) -> dict[str, Any]:
        """Collect the arguments as sent; an argument that was not sent keeps its original value."""
        return {
            name: self.cleaned_data.get(PREFIX + name, value) if PREFIX + name in self.data else value
            for name, value in self.original.items()
        }

    def clean(self) -> dict[str, Any]:
        """Refuse an edit of a masked argument, and an edit without changes; raises ValidationError."""
        if any(name.startswith(PREFIX) and name not in self.fields for name in self.data):
            raise forms.ValidationError(
                _("An argument that you sent is masked now. Have it shown again, or leave it.")
            )
        is_same = self.fits and not self.errors
        if is_same and canonical.dumps(self.arguments) == canonical.dumps(self.original):
            raise forms.ValidationError(_("You changed nothing. To approve the call as it is, use Approve."))
        return self.cleaned_data


class ValueField(forms.JSONField):
    """A field for any JSON value; written in ASCII with \\u escapes if a character is not shown."""

    default_error_messages = {"invalid": _("This is not JSON.")}

    def to_python(self, value: Any) -> Any:
        """Parse the text as JSON; raises ValidationError."""
        try:
            return super().to_python(value)
        except (ValueError, RecursionError):  # a number too long or brackets too deep: Django lets these out
            raise forms.ValidationError(self.error_messages["invalid"], code="invalid") from None

    def bound_data(self, data: Any, initial: Any) -> Any:
        """Show the submitted text again, even if it is no JSON."""
        try:
            return super().bound_data(data, initial)
        except (ValueError, RecursionError):
            return forms.fields.InvalidJSONInput(data)

    def prepare_value(self, value: Any) -> Any:
        """Format the value as JSON on several lines; a text that is no JSON stays unchanged."""
        if isinstance(value, forms.fields.InvalidJSONInput):
            return value
        text = json.dumps(value, indent=2, ensure_ascii=False)
        return text if bare(text) == text else json.dumps(value, indent=2)


def _field(name: str, tool: dict[str, Any], value: Any) -> forms.Field:
    """Build the form field that fits an argument's schema and value, or else a field for JSON.

    Follows a `$ref` in the schema once.
    """
    given: dict[str, Any] = tool.get("properties", {}).get(name, {})

    def followed(kind: dict[str, Any]) -> Any:
        return tool.get("$defs", {}).get(kind.get("$ref", "").rpartition("/")[2], kind)

    schema = {**followed(given), **{key: given[key] for key in ("description",) if key in given}}
    if "anyOf" in given:
        schema = {**given, "anyOf": [followed(kind) for kind in given["anyOf"]]}
    options: dict[str, Any] = {"label": plain(name), "initial": value, "required": False}
    options["help_text"] = plain(schema.get("description", ""))
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    optional = len(kinds) < len(schema.get("anyOf", [schema]))
    kind = kinds[0] if len(kinds) == 1 else {}
    if not optional and value in kind.get("enum", []) and all(isinstance(e, str) for e in kind["enum"]):
        return forms.ChoiceField(choices=[(each, plain(each)) for each in kind["enum"]], **options)
    if kind.get("type") == "boolean" and isinstance(value, bool) and not optional:
        return forms.TypedChoiceField(
            choices=[("true", _("yes")), ("false", _("no"))],
            coerce=lambda text: text == "true",
            **{**options, "initial": "true" if value else "false"},
        )
    is_number, is_empty = type(value) in (int, float), value is None and optional
    if kind.get("type") in ("integer", "number") and (is_empty or (is_number and math.isfinite(value))):
        field = forms.IntegerField if kind["type"] == "integer" else forms.FloatField
        bounds: dict[str, Any] = {"min_value": kind.get("minimum"), "max_value": kind.get("maximum")}
        return field(**bounds, **{**options, "required": not optional})
    if isinstance(value, str) and not optional and "\r" not in value and bare(value) == value:
        widget: forms.Widget = area(min(MOST_ROWS, value.count("\n") + len(value) // 80 + 1))
        if len(value) <= SHORT and "\n" not in value:
            widget = forms.TextInput(attrs={"class": "vTextField"})
        return TypedField(strip=False, widget=widget, **options)
    lines = ValueField().prepare_value(value).count("\n") + 1
    code = forms.Textarea(attrs={"rows": min(lines, MOST_ROWS), "class": "ar-json", "spellcheck": "false"})
    return ValueField(widget=code, **options)
