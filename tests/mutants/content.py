"""Guards of pictures and documents: what is taken, what is stored, who is served."""

from __future__ import annotations

from tests.mutants import Edit, Mutant

CONTENT, PAYLOADS, MASKING = "agents/content.py", "journal/payloads.py", "journal/masking.py"
TRANSFER, CONVERSATION = "services/transfer.py", "journal/conversation.py"

MUTANTS = [
    Mutant(
        "content: no file lies about its type",
        (Edit(CONTENT, "        if declared != found:\n", "        if False:\n"),),
        ("api/test_uploads.py::test_what_is_refused", "unit/test_content.py::test_what_is_no_picture"),
    ),
    Mutant(
        "content: no file is larger than the project allows",
        (Edit(CONTENT, "        if len(self.data) > most:\n", "        if False:\n"),),
        ("unit/test_content.py::test_the_limit_of_a_file",),
    ),
    Mutant(
        "content: the scanner is asked about an input",
        (
            Edit(
                CONTENT,
                "        if isinstance(block, File):\n            block.scan()\n    return",
                "    return",
            ),
        ),
        ("unit/test_content.py::test_a_scanner_sees_each_file_before_it_is_taken",),
    ),
    Mutant(
        "content: the scanner is asked about a result",
        (Edit(CONTENT, "            if isinstance(block, File):\n                block.scan()\n", ""),),
        ("unit/test_content.py::test_a_scanner_sees_each_file_before_it_is_taken",),
    ),
    Mutant(
        "content: a name has no folder and no control character",
        (Edit(CONTENT, '"".join(each if each.isprintable() else "_" for each in last)', "last"),),
        ("unit/test_content.py::test_a_name_is_one_line_without_a_folder",),
    ),
    Mutant(
        "content: a plain digest of a file is no part of a run's input",
        (Edit(CONTENT, "digest.hexdigest()[:32]", 'str(block.get("sha256"))'),),
        ("unit/test_content.py::test_their_json_form_has_each_file_once",),
    ),
    Mutant(
        "content: what the provider would refuse is refused before",
        (Edit("services/submit.py", "    attachments.require_taken(", "    list("),),
        ("db/test_content.py::test_bad_input_starts_nothing",),
    ),
    Mutant(
        "content: of too many files the newest are sent",
        (Edit(CONVERSATION, "            if not room.take(attached):\n                continue\n", ""),),
        ("db/test_content.py::test_of_too_many_pictures_the_newest_are_sent",),
    ),
    Mutant(
        "content: a small file is verified as well",
        (
            Edit(
                PAYLOADS,
                "    if (size, digest.hexdigest()) != (stored.size, stored.sha256):",
                "    if False:",
            ),
        ),
        ("db/test_content.py::test_a_small_file_is_verified_too",),
    ),
    Mutant(
        "content: what repeats a picture is erased with it",
        (Edit("services/erasure.py", "        if payloads.has_blocks(row.payload):", "        if False:"),),
        ("db/test_content.py::test_erasing_a_picture_takes_every_row_that_repeats_it",),
    ),
    Mutant(
        "content: the same task under a key that was given up",
        (
            Edit(
                "services/submit.py",
                "same = any(content.described(blocks, key) == run.input for key in keys)",
                "same = False",
            ),
        ),
        ("db/test_content.py::test_the_same_blocks_are_the_same_task_also_under_a_new_secret_key",),
    ),
    Mutant(
        "content: files of sensitive results are guarded",
        (Edit(MASKING, 'return self.guards(tool) if block.get("type") == "image" else', "return False and"),),
        ("db/test_content.py::test_what_is_sensitive_is_guarded",),
    ),
    Mutant(
        "content: a sensitive result of blocks is shown to nobody",
        (Edit(MASKING, " or payloads.has_blocks(row.payload):", ":"),),
        ("api/test_uploads.py::test_sensitive_results_take_the_permission",),
    ),
    Mutant(
        "content: a row that is shown has no bytes",
        (Edit(MASKING, 'if self.guards_file(row.tool_name) else {"data"}', "if False else set()"),),
        ("api/test_uploads.py::test_rows_and_conversations_name_files",),
    ),
    Mutant(
        "content: everything but pictures is an attachment",
        (Edit(TRANSFER, "content_disposition_header(not is_picture,", "content_disposition_header(False,"),),
        ("api/test_uploads.py::test_files_are_served",),
    ),
    Mutant(
        "content: an upload is read after it is known who sends it",
        (
            Edit(
                "api/routing.py",
                "uploads.require_small(request)",
                "uploads.UploadModel.get_request_data(request, operation.api, {})",
            ),
        ),
        ("api/test_uploads.py::test_only_who_may_start_is_read",),
    ),
]
