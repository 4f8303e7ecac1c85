"""DBOS: "each time you restart your application's process, DBOS recovers" what was executing."""

from __future__ import annotations

from dbos import DBOS, SetWorkflowID

from benchmarks.kill_comparison import world
from benchmarks.systems.dbos import launch


@DBOS.step()
def propose(step: int) -> str | None:
    """Ask the model."""
    return world.propose(step)


@DBOS.step()
def find_order() -> str:
    """Find the order."""
    return world.act("find_order", _key())


@DBOS.step()
def charge_card() -> str:
    """Charge the card."""
    return world.act("charge_card", _key())


@DBOS.step()
def send_receipt() -> str:
    """Send the receipt."""
    return world.act("send_receipt", _key())


def _key() -> str:
    return f"{DBOS.workflow_id}:{DBOS.step_id}"


@DBOS.workflow()
def fulfil() -> str:
    """Go on until the model asks for no tool."""
    tools = {"find_order": find_order, "charge_card": charge_card, "send_receipt": send_receipt}
    step = 0
    while name := propose(step):
        tools[name]()
        step += 1
    return "fulfilled"


def start(variant: str, url: str) -> None:
    """Call the workflow."""
    launch(url)
    with SetWorkflowID(world.ORDER):
        fulfil()


def recover(variant: str, url: str) -> world.Outcome:
    """Restart the application, and wait for the workflow."""
    launch(url)
    DBOS.retrieve_workflow(world.ORDER).get_result()
    status = DBOS.get_workflow_status(world.ORDER)
    assert status is not None
    steps = DBOS.list_workflow_steps(world.ORDER)
    charges = [step["error"] for step in steps if step["function_name"].endswith("charge_card")]
    errors = sum(error is not None for error in charges)
    record = f"{len(charges)} step, {errors} errors; recovery_attempts {status.recovery_attempts}"
    return world.Outcome(world.BY_ITSELF, record, status.status)
