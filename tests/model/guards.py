"""The guards of the protocol by name. Without any one of them the model breaks an invariant."""

from __future__ import annotations

Off = frozenset[str]  # the names of the guards that are taken out
NONE: Off = frozenset()

GUARDS = {
    "the claim": "A driver claims a run only if its lease is free or has run out.",
    "the takeover": "A lease that has run out can be claimed.",
    "the epoch": "An append is refused if the run has another lease by now.",
    "the last row": "An append that does not know the last row is built again on the newest state.",
    "start before handler": "The start of a call is in the journal before its handler is entered.",
    "the deadline": "A driver whose time is over extends its lease before it enters a handler.",
    "the hold": "A started call of a tool that declares nothing is held for a person.",
    "the question": "A started call of a tool with reconcile is asked about before it runs again.",
    "one transaction": "The effect and the result of a transactional tool are one transaction.",
    "the gate": "A call that needs approval waits for it.",
    "the pending card": "A decision counts only on a card that is pending.",
    "the expiry": "A decision after the card's time is refused.",
    "the consumption": "The start of a call consumes its approval.",
    "the order": "Later calls of a reply wait for a call that waits, unless they are parallel.",
    "the stop after a doubt": "Later calls of a reply are cancelled after a call with an unknown outcome.",
    "cancel before start": "No call starts once a cancel is requested.",
    "the settlement": "The end of a run settles its open calls.",
    "the evidence": "A late result refuses the verdict that the call did not happen.",
    "the contradiction": "A call said not to have happened is not run again once its handler has returned.",
    "the late result": "A driver that lost the run keeps what its handler returned.",
    "the end": "A driver appends nothing to a run that has ended.",
    "the row of the event": "The row of a call's event is made with its start.",
    "the early event": "A wait that begins finds the event that came before.",
    "the untold event": "A result settles no event that came and is not in the journal yet.",
    "the second look": "An event is stored for later only if nobody waits by then.",
    "the first delivery": "An event that was delivered, or another of its call, is not delivered again.",
    "one delivery": "The row of an event and the journal have a delivery in one transaction.",
    "the time of a wait": "The sweep ends a wait only after its time.",
    "the sweep of events": "The sweep settles events that are due.",
    "the result of an open call": "A handler's return is no second result after that of its event.",
    "the start of an open call": "A call whose event came meanwhile does not start again.",
    "the fence": "A service that takes a lease gives it a new epoch.",
}
