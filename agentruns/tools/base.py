"""The decorator `@tool`, and the class Tool: a function that the model may call, as the engine uses it."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial, update_wrapper
from io import IOBase
from typing import Any, Generic, Unpack, overload

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from typing_extensions import ParamSpec, TypeVar

from agentruns import content
from agentruns.exceptions import ToolRefused
from agentruns.tools import finite
from agentruns.tools.card import MASK, call_text, one_line
from agentruns.tools.context import NotOccurred, Occurred, Pending, ToolContext, ToolOutput, Unknown
from agentruns.tools.options import Gate, Options, Risk, ToolKeywords
from agentruns.tools.refusals import Refusal
from agentruns.tools.results import SameKeyError, dumped, to_jsonable
from agentruns.tools.signature import Signature, signature_of
from agentruns.utils import json as canonical
from agentruns.utils.bounds import MAX_DEPTH, MAX_RESULT_DEPTH, is_deeper
from agentruns.utils.calls import call, path_of
from agentruns.utils.redaction import conceal, concealing, get_logger

logger = get_logger("agentruns.tools")

P = ParamSpec("P", default=...)
R = TypeVar("R", default=Any)
Answer = Occurred | NotOccurred | Pending | Unknown  # of `reconcile`

# The options that a Definition has as they are.
_TOLD = ("approvers", "approvals", "risk", "safe_to_retry", "transactional", "parallel", "timeout")
_TOLD_WHERE_SET = (
    "only_answers", "agent", "origin", "awaits", "only_waits", "deferred", "untrusted", "outward",
)  # fmt: skip
MOST_TRIES = 300_000  # of validating an object of one input, about a second
_MAX_ERRORS = 10
_BRIEF = {"include_url": False, "include_context": False, "include_input": False}
_MAX_NAME = 60
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class InvalidArguments(ToolRefused, ValueError):
    """Raised for input that does not fit a tool's signature, with a short message for the model."""


class Tool(Options, Generic[P, R]):
    """A declared tool with its options. Calling it calls the plain function, for unit tests."""

    def __init__(
        self, fn: Callable[P, R], name: str, description: str, signature: Signature, options: Options
    ) -> None:
        update_wrapper(self, fn)
        self.fn = fn
        self.name = name
        self.description = description
        self.signature = signature
        self.input_schema = signature.schema
        vars(self).update(vars(options))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the plain function; a coroutine function returns its coroutine."""
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Tool {self.name}>"

    # As the model and the Definition see it

    def provider_schema(self) -> dict[str, Any]:
        """Build the form that a provider receives: name, description and input_schema."""
        schema = copy.deepcopy(self.input_schema)
        return {"name": self.name, "description": self.description, "input_schema": schema}

    def policy(self) -> dict[str, Any]:
        """Build this tool's part of a Definition, as JSON."""
        asks = self.requires_approval
        return {
            **self.provider_schema(),
            **{name: getattr(self, name) for name in _TOLD},
            "requires_approval": asks if isinstance(asks, bool) else "predicate",
            "expires_in": self.expires_in.total_seconds() if self.expires_in else None,
            "reconcile": self.reconcile is not None,
            "sensitive": list(self.sensitive),
            # Only where it is set, so that the definition hash of every other tool stays the same.
            **{name: value for name in _TOLD_WHERE_SET if (value := getattr(self, name))},
            **({"sensitive_results": list(self.sensitive_results)} if self.sensitive_results else {}),
            **({"refuses": sorted(map(path_of, self.refuses))} if self.refuses else {}),
            **({} if self.rules is None else {"rules": self.rules}),
            **({"holds": True} if self.holds else {}),
        }

    # A call's life

    def effective(self, raw: Any) -> dict[str, Any]:
        """Convert a model's input to effective arguments: validated, coerced, with defaults, as JSON.

        Raises InvalidArguments for invalid input. Also raises it for input that changes if it is validated
        again, because after a restart the handler would receive other arguments than a person has approved.
        """
        arguments = self._read(raw)[1]
        again = self._read(arguments)[1]
        try:
            same = canonical.dumps(arguments) == canonical.dumps(again)
        except (TypeError, ValueError, RecursionError):
            raise InvalidArguments("The arguments cannot be stored as JSON.") from None
        if not same:
            pairs = [(name, each, again[name]) for name, each in arguments.items() if name in again]
            kept = {name for name, each, other in pairs if canonical.dumps(each) == canonical.dumps(other)}
            names = ", ".join(name for name in arguments if name not in kept) or "input"
            raise InvalidArguments(f"{names}: this value does not read back as itself.")
        return arguments

    def revalidated(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Convert recorded arguments to JSON by the tool's present signature.

        A parameter that the tool got since takes its default if the schema declares the default, because only
        such a default is the same at every attempt. Raises InvalidArguments if a recorded value would change.
        """
        plain = self._read(arguments)[1]
        declared = self.input_schema.get("properties", {}).items()
        since = {name: form["default"] for name, form in declared if name in plain and "default" in form}
        if changed := canonical.first_difference(since | arguments, plain):
            raise InvalidArguments(f"{changed.path.removeprefix('$.')}: the tool now reads another value.")
        return plain

    def asks(self, arguments: dict[str, Any], ctx: ToolContext) -> bool:
        """Check whether a call needs approval; also True if `requires_approval` raises or returns None."""
        if isinstance(self.requires_approval, bool):
            return self.requires_approval

        def read(answer: Any) -> bool:
            # None is a forgotten `return`; read as False it would silently open the gate.
            return True if answer is None else bool(answer)

        asks = self._ask("requires_approval", read, arguments, ctx, failed="; a person is asked")
        return asks is not False

    def title(self, arguments: dict[str, Any]) -> str:
        """Describe the call on one line: by `describe`, or else by the tool's name and arguments.

        The sensitive arguments are masked first, so that the title contains none of their values.
        """
        masked = self.masked(arguments)

        def read(text: Any) -> str:
            return one_line(text) if isinstance(text, str) and text.strip() else ""

        with concealing(self._hidden(arguments)):
            said = None if self.describe is None else self._ask("describe", read, masked)
        return said or call_text(self.name, masked)

    def masked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Mask sensitive arguments, if the tool has any, and unknown arguments, which may be misspelt."""
        if not self.sensitive:
            return arguments
        shown = {*self.input_schema.get("properties", ())} - {*self.sensitive}
        return {name: value if name in shown else MASK for name, value in arguments.items()}

    def preview_of(self, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """Call `preview` and convert its dict to JSON; None without a preview or a dict. Never raises."""
        preview = None if self.preview is None else self._ask("preview", lambda answer: answer, arguments)
        return to_jsonable(preview)[0] if isinstance(preview, dict) else None

    def held(self, arguments: dict[str, Any], ctx: ToolContext) -> list[Any]:
        """Call `holds` and convert its value to JSON, in a list of one; [] if that fails. Never raises.

        None fails, because it is a forgotten `return`. So does what has no form in JSON: its text may stay
        the same while the value changes.
        """
        with suppress(InvalidArguments):  # by what the tool takes now, or else as they were recorded
            arguments = self.revalidated(arguments)

        def read(answer: Any) -> list[Any]:
            plain, is_text = to_jsonable(answer)
            if plain is None or is_text:
                raise TypeError(f"holds returned {type(answer).__name__}, which is not JSON.")
            return [plain]

        return self._ask("holds", read, arguments, ctx, failed="; a person is asked") or []

    def _ask(
        self, hook: str, read: Callable[[Any], Any], arguments: dict[str, Any], *more: Any, failed: str = ""
    ) -> Any:
        """Call a hook of the tool with copied arguments and convert its answer; None if either fails."""
        with concealing(self._hidden(arguments)):
            try:
                return read(call(getattr(self, hook), copy.deepcopy(arguments), *more))
            except Exception:
                logger.warning("%s of %s failed%s", hook, self.name, failed, exc_info=True)
                return None

    def invoke(self, ctx: ToolContext, arguments: dict[str, Any]) -> ToolOutput:
        """Call the handler once with effective arguments, and return its output.

        Before that, raises InvalidArguments if the arguments are not effective, and NotEntered if the lease
        is over or the call was given up. Exceptions of the handler pass through. After it has returned,
        nothing raises, except TypeError for a Pending of a tool that awaits no event.
        """
        conceal(self._hidden(arguments))
        model, again = self._read(arguments)
        if canonical.dumps(again) != canonical.dumps(arguments):
            raise InvalidArguments("These are not effective arguments: validating them changes them.")
        values = {name: getattr(model, field) for name, field in self.signature.parameters.items()}
        if self.signature.context is not None:
            values[self.signature.context] = ctx

        async def enter() -> Any:
            ctx._look()  # here too, because an event loop takes a while to start
            return await self.fn(**values)  # type: ignore[call-arg, misc]

        ctx._look()
        result = call(enter) if inspect.iscoroutinefunction(self.fn) else call(self.fn, **values)
        if isinstance(result, Iterator) and not isinstance(result, IOBase):
            result = list(result)  # a generator is handler code that has yet to run
        if isinstance(result, Pending) and not (self.awaits or self.only_waits or self.poll):
            raise TypeError(f"{self.name} returned Pending, but awaits no event: declare @tool(awaits=...).")
        if isinstance(result, Pending):
            return ToolOutput(None, pending=result)
        return self.output(result)

    def _hidden(self, arguments: dict[str, Any]) -> list[Any]:
        """List the values of the sensitive arguments, which log records must not contain."""
        return [arguments.get(name) for name in self.sensitive]

    def _read(self, raw: Any) -> tuple[BaseModel, dict[str, Any]]:
        """Validate arguments; return the model and its JSON.

        Raises InvalidArguments, also for NaN and infinity where the annotation does not allow them.
        """
        model = self.signature.model
        # `effective` also reads its own result, because a parameter may read a text as JSON.
        if is_deeper(raw, MAX_DEPTH):
            raise InvalidArguments(f"The arguments are nested more than {MAX_DEPTH} levels deep.")
        if (most := self.signature.alternatives) > 1 and _tries(raw, 1, most) > MOST_TRIES:
            raise InvalidArguments(
                "The arguments are nested too deeply: each level has several types, and to try all of them "
                "takes too long. Give fewer levels, or fewer values at the deepest ones."
            )
        if not isinstance(raw, dict):
            raise InvalidArguments(f"The input must be a JSON object, not {type(raw).__name__}.")
        try:
            text = to_json(raw, inf_nan_mode="constants")
        except Exception:
            text = None  # a lone surrogate, or not JSON: only lenient validation can tell which
        try:
            # Validated as JSON, so that a strict datetime accepts its text, as it must after a restart.
            validated = model.model_validate(raw) if text is None else model.model_validate_json(text)
        except ValidationError as error:
            details = error.errors(**_BRIEF)
            lines = [f"- {_line(each['loc'], each['msg'], 'input')}" for each in details[:_MAX_ERRORS]]
            if len(details) > _MAX_ERRORS:
                lines.append(f"- and {len(details) - _MAX_ERRORS} more")
            if any(each["type"] == "extra_forbidden" for each in details):
                names = [field.alias or name for name, field in model.model_fields.items()]
                lines.append(f"Parameters: {', '.join(names) or 'none'}.")
            raise InvalidArguments("\n".join(["Invalid arguments:", *lines])) from None
        except Exception as error:
            kind = type(error).__name__
            raise InvalidArguments(f"The arguments could not be validated: {kind}.") from error
        try:
            plain = validated.model_dump(mode="json", by_alias=True, round_trip=True, warnings=False)
            found = [*finite.places(validated)]
            inside = {place[0] for place, _allowed in found}
            # A type of the project may hide a number from the walk and write it.
            found += [each for each in finite.places(plain) if each[0][0] not in inside]
        except Exception as error:
            kind = type(error).__name__
            raise InvalidArguments(f"The arguments cannot be stored as JSON: {kind}.") from error
        if refused := [place for place, allowed in found if not allowed][:_MAX_ERRORS]:
            lines = [f"- {_line(place, finite.MESSAGE, 'input')}" for place in refused]
            raise InvalidArguments("\n".join(["Invalid arguments:", *lines]))
        return validated, plain

    def output(self, result: Any) -> ToolOutput:
        """Convert a handler's result to JSON; never raises. A result with a block becomes blocks."""
        if content.is_block(result):
            blocks: list[content.Block] = []
            for item in result if isinstance(result, list | tuple) else [result]:
                if isinstance(item, content.Text | content.File):
                    blocks.append(item)
                else:
                    plain = to_jsonable(item)[0]
                    blocks.append(content.Text(plain if isinstance(plain, str) else canonical.dumps(plain)))
            made = content.packed(content.admitted(blocks))
            return ToolOutput(made["content"], {"stored": made["stored"]})
        flags: dict[str, Any] = {}
        adapter = self.signature.returns
        if adapter is not None:
            try:
                fitting = adapter.validate_python([result])
            except Exception as error:
                flags["misfit"] = _misfit(error)
            else:
                try:
                    plain = dumped(adapter, fitting)[0]
                    canonical.dumps(plain)
                    if not is_deeper(plain, MAX_RESULT_DEPTH):
                        return ToolOutput(plain)
                except SameKeyError as error:
                    flags["misfit"] = str(error)
                except Exception:
                    logger.debug("The result of %s is stored without its annotation", self.name)
        plain, stringified = to_jsonable(result)
        return ToolOutput(plain, flags | ({"stringified": True} if stringified else {}))

    def run_reconcile(self, ctx: ToolContext, arguments: dict[str, Any]) -> Answer:
        """Call `reconcile` to learn whether the call happened. A missing verdict or an error becomes Unknown.

        The result in Occurred is converted to JSON like a handler's. Raises NotEntered if the lease is over
        or the call was given up.
        """
        if self.reconcile is None:
            return Unknown(f"{self.name} declares no reconcile function.")
        conceal(self._hidden(arguments))
        ctx._look()
        try:
            verdict = call(self.reconcile, ctx, copy.deepcopy(arguments))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            logger.warning("reconcile of %s failed", self.name, exc_info=True)
            return Unknown(one_line(f"reconcile raised {type(error).__name__}: {to_jsonable(error)[0]}"))
        if isinstance(verdict, Occurred):
            output = self.output(verdict.result)
            return Occurred(output.content, _stored=output.flags.get("stored"))
        if isinstance(verdict, NotOccurred | Unknown) or (isinstance(verdict, Pending) and self.awaits):
            return verdict
        kind = verdict.__name__ if isinstance(verdict, type) else type(verdict).__name__
        return Unknown(f"reconcile returned {kind}, not an Occurred(), NotOccurred() or Unknown().")


@overload
def tool(fn: Callable[P, R], **options: Unpack[ToolKeywords]) -> Tool[P, R]: ...


@overload
def tool(fn: None = None, **options: Unpack[ToolKeywords]) -> Callable[[Callable[P, R]], Tool[P, R]]: ...


def tool(
    fn: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    requires_approval: Gate = False,
    approvers: str | None = None,
    approvals: int = 1,
    expires_in: timedelta | None = None,
    remind_after: timedelta | None = None,
    escalate_after: timedelta | None = None,
    escalate_to: str | None = None,
    risk: Risk = "normal",
    describe: Callable[[dict[str, Any]], str] | None = None,
    preview: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    holds: Callable[[dict[str, Any], Any], Any] | None = None,
    safe_to_retry: bool = False,
    transactional: bool = False,
    reconcile: Callable[[Any, dict[str, Any]], Any] | None = None,
    parallel: bool = False,
    timeout: float | timedelta | None = None,
    sensitive: Iterable[str] = (),
    sensitive_results: Iterable[str] = (),
    refuses: Refusal | Iterable[Refusal] = (),
    sent_max: int | None = None,
    awaits: str | None = None,
    deferred: bool = False,
    untrusted: bool = False,
    outward: bool = False,
    rules: bool | None = None,
) -> Any:
    """Declare a function as a tool, as `@tool` or as `@tool(...)`.

    The model sees the signature as a JSON Schema, and the docstring as descriptions. A parameter annotated
    ToolContext receives the context of the call. `refuses` names the exceptions that mean that nothing
    happened, or functions that check an exception for that, such as `http_refusal`. Of a result that is
    longer than `sent_max` characters, a request sends an excerpt. `awaits` names the event that brings the
    result if the handler returns Pending. With `deferred`, the run goes on while a call waits for people or
    its event, and hears the outcome as a message of the program. `rules` says whether standing rules may
    answer for people; unless given, they may if the risk is not high. While nobody decides, people are
    reminded after `remind_after`, and those in `escalate_to` are told after `escalate_after`. `untrusted`
    declares that the tool reads text that outsiders wrote, and `outward` that it sends, pays or publishes:
    once a conversation holds such text, its outward calls ask a person. Raises TypeError for options that
    contradict each other, and for a parameter whose values could not be shown, stored and read back
    unchanged.
    """
    options = {**locals()}  # the arguments of this call; all but three are options
    for argument in ("fn", "name", "description"):
        del options[argument]
    given: Any = {"name": name, "description": description, "options": Options.of(options)}
    # The caller's local names, for types that are defined beside the tool inside a function.
    declare: Any = partial(declared, **given, local_names=sys._getframe(1).f_locals)
    return declare if fn is None else declare(fn)


def declared(
    fn: Callable[..., Any],
    name: str | None,
    description: str | None,
    options: Options,
    local_names: Mapping[str, Any],
) -> Tool[..., Any]:
    """Build a tool from a function and its options; raises TypeError as `tool` does."""
    if isinstance(fn, Tool):
        raise TypeError(f"{fn!r} is a tool already.")
    if not inspect.isroutine(fn):
        raise TypeError(f"@tool declares a function, not {fn!r}.")
    name = fn.__name__ if name is None else name
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TypeError(
            f"A tool cannot be named {name!r}: providers accept at most 64 letters, digits, _ and -. "
            "Pass name=."
        )
    inner = inspect.unwrap(fn)
    if inspect.isasyncgenfunction(inner):
        raise TypeError(f"Tool {name!r} is an async generator: return a list.")
    is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(inner)
    read = signature_of(fn, name, local_names)
    options.check(name, is_async=is_async, parameters=read.parameters)
    text = read.description if description is None else description
    return Tool(fn, name, text, read, options)


def _tries(value: Any, times: int, alternatives: int) -> int:
    """Count how often the objects in a value are validated, if each level has so many alternatives."""
    if isinstance(value, dict):
        return times + sum(_tries(each, times * alternatives, alternatives) for each in value.values())
    return sum(_tries(each, times, alternatives) for each in value) if isinstance(value, list) else 0


def _misfit(error: Exception) -> str:
    """Explain on one line why a result does not fit its annotation; never raises."""
    with suppress(Exception):
        if isinstance(error, ValidationError):
            # The result was validated inside a list of one.
            found = error.errors(**_BRIEF)[:3]
            return "; ".join(_line(each["loc"][1:], each["msg"], "result") for each in found)
    return type(error).__name__


def _line(loc: tuple[int | str, ...], message: str, otherwise: str) -> str:
    where = ".".join(str(part) for part in loc) or otherwise
    return f"{one_line(where, _MAX_NAME)}: {one_line(message)}"
