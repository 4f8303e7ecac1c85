"""Guards between the models of several providers."""

from __future__ import annotations

from tests.mutants import Edit, Mutant

LOOP, OPENAI, RESPONSES = "engine/loop.py", "providers/openai.py", "providers/responses.py"
BLOCKS, CHAT, CLAUDE = "providers/blocks.py", "providers/chat.py", "providers/anthropic.py"

MUTANTS = [
    Mutant(
        "providers: the fallback answers an overload only",
        (Edit(LOOP, "model is driver.agent.model and error.is_overload", "model is driver.agent.model"),),
        ("providers/test_runs.py::test_the_fallback_is_not_for_other_troubles",),
    ),
    Mutant(
        "providers: a fallback ends and holds no run",
        (Edit(LOOP, "if overload is not None and error.disposition", "if False and error.disposition"),),
        (
            "providers/test_runs.py::test_a_fallback_that_cannot_answer_ends_and_holds_no_run_that_would_only_wait",
        ),
    ),
    Mutant(
        "providers: the fallback is not asked after a switch",
        (Edit(LOOP, "driver.run.pause_requested or driver.should_stop()\n", "driver.run.pause_requested\n"),),
        ("providers/test_runs.py::test_the_fallback_is_not_asked_after_its_agent_was_switched_off",),
    ),
    Mutant(
        "providers: the parameters of one are not sent to another",
        (Edit(LOOP, 'if same or name == "max_tokens"', "if True"),),
        ("providers/test_runs.py::test_the_fallback_answers_when_the_first_is_overloaded",),
    ),
    Mutant(
        "providers: the SDK of OpenAI does not retry",
        (Edit("providers/failures.py", "with_options(max_retries=0, **own)", "with_options(**own)"),),
        ("providers/test_openai.py::test_a_code_beside_a_status",),
    ),
    Mutant(
        "providers: OpenAI's key goes to no other server",
        (Edit(OPENAI, "os.environ.get(self._quirks.key)", 'os.environ.get("OPENAI_API_KEY")'),),
        ("providers/test_openai.py::test_each_server_has_its_own_key",),
    ),
    Mutant(
        "providers: reasoning goes back to its own model only",
        (Edit(RESPONSES, 'own = block.get("from") == identity and "', 'own = "item" in block and "'),),
        ("providers/test_openai.py::test_reasoning_goes_back_as_it_came_and_only_to_its_own_model",),
    ),
    Mutant(
        "providers: what Claude cannot read is not sent to it",
        (Edit(BLOCKS, "                raise foreign(others[0])\n", "                pass\n"),),
        ("providers/test_openai.py::test_items_that_only_openai_understands_go_back_to_it",),
    ),
    Mutant(
        "providers: the pieces of a call are joined, also in one chunk",
        (Edit(CHAT, "found = _fitting(calls, piece)\n", "found = []\n"),),
        ("providers/test_streams.py::test_a_call_and_the_first_piece_of_its_arguments_in_one_event",),
    ),
    Mutant(
        "providers: a stream that leaves a doubt is asked for again",
        (Edit(BLOCKS, "(not sure and (empty or broken))", "False"),),
        ("providers/test_streams.py::test_forms_that_leave_a_doubt_are_asked_again",),
    ),
    Mutant(
        "providers: a call without a name is never left out",
        (Edit(BLOCKS, " or not all(name for name, _ in calls):", ":"),),
        (
            "providers/test_streams.py::test_arguments_of_no_call_are_asked_for_again_and_nothing_runs_meanwhile",
        ),
    ),
    Mutant(
        "providers: a call and one that may be the same call do not both run",
        (Edit(CHAT, '[("", "")] * self._in_doubt', "[]"),),
        (
            "providers/test_streams.py::test_forms_that_leave_a_doubt_are_asked_again",
            "providers/test_streams.py::test_two_names_make_no_third",
        ),
    ),
    Mutant(
        "providers: null in place of arguments is none",
        (Edit(BLOCKS, 'in ("", "null"))', 'in ("",))'),),
        ("providers/test_streams.py::test_a_call_without_arguments_however_it_is_said",),
    ),
    Mutant(
        "providers: a place where another item was tells nothing of a piece",
        (Edit(RESPONSES, ' and named <= {found[place].get("call_id")} else', " else"),),
        ("providers/test_streams.py::test_a_response_that_leaves_a_doubt_is_asked_again",),
    ),
    Mutant(
        "providers: arguments that no call takes are asked for again",
        (Edit(RESPONSES, "not {owner for owner, _ in owned} <= {*calls}", "False"),),
        ("providers/test_streams.py::test_a_response_that_leaves_a_doubt_is_asked_again",),
    ),
    Mutant(
        "providers: the arguments of a response that differ are asked for again",
        (Edit(RESPONSES, "any(each != wholes[0] for each in wholes)", "False"),),
        ("providers/test_streams.py::test_a_response_that_leaves_a_doubt_is_asked_again",),
    ),
    Mutant(
        "providers: half an input of Claude's does not run",
        (Edit(CLAUDE, "text if text and whole_object(text) is None else block.input", "block.input"),),
        ("providers/test_streams.py::test_an_input_that_lacks_its_end_is_for_the_gate_to_refuse",),
    ),
    Mutant(
        "providers: blocks that begin in another order are asked for again",
        (Edit(CLAUDE, "event.index != len(answer.raw.content) - 1", "event.index < 0"),),
        ("providers/test_streams.py::test_blocks_that_begin_in_another_order_are_asked_for_again",),
    ),
    Mutant(
        "providers: a forked process asks over connections of its own",
        (Edit("providers/failures.py", "is_forked = self._pid != os.getpid()", "is_forked = False"),),
        ("providers/test_forks.py::test_forked_workers_store_the_replies_to_their_own_requests",),
    ),
    Mutant(
        "providers: a client that was given is copied without its connections",
        (Edit("utils/forks.py", 'members |= {"_connections": [], "_requests": []}', "pass"),),
        ("providers/test_forks.py::test_a_client_of_a_projects_own_keeps_its_transports_and_no_connection",),
    ),
    Mutant(
        "forks: what a thread of the parent holds is free in a fork",
        (Edit("utils/forks.py", "        os.register_at_fork(after_in_child=renew)\n", "        pass\n"),),
        ("providers/test_forks.py::test_what_a_thread_of_the_parent_holds_is_free_in_a_fork",),
    ),
]
