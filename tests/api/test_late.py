"""The operations are known by name from the start; their modules and models come with the first request."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import pytest
from ninja import NinjaAPI
from ninja.errors import ConfigError

from agentruns.api import build_api, router
from agentruns.api.routing import ENDPOINTS, LateOperation
from tests.crash.processes import ROOT

SETUP = """
import json, os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
import django
django.setup()
loaded = lambda: [each for each in sys.modules if each.startswith("agentruns.api.")]
"""
CHECK = "from django.core.management import call_command; call_command('check')"


def act(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{SETUP}{code}\nprint(json.dumps(loaded()))"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_loading_the_urls_imports_no_endpoint_and_makes_no_model() -> None:
    found = act(CHECK)
    assert "agentruns.api.routing" in found
    endpoints = {f"agentruns.api.{endpoint.partition('.')[0]}" for endpoint in ENDPOINTS.values()}
    assert not {*endpoints, "agentruns.api.schemas"} & {*found}


def test_threads_that_ask_at_once_are_all_answered() -> None:
    asked = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from agentruns.api import build_api
api, start = build_api(), Barrier(16)
operations = [one for bound in api._get_bound_routers() for view in bound.path_operations.values()
              for one in view.operations]
def ask(number):
    start.wait()
    return [[model.__name__ for model in operations[(number + each) % 21].models] for each in range(21)]
with ThreadPoolExecutor(16) as pool:
    found = list(pool.map(ask, range(16)))
assert all(sorted(map(str, each)) == sorted(map(str, found[0])) for each in found)
"""
    assert "agentruns.api.schemas" in act(asked)


def test_each_declaration_is_that_of_its_name() -> None:
    operations = [one for view in router.path_operations.values() for one in view.operations]
    for operation in operations:
        assert isinstance(operation, LateOperation)
        endpoint = ENDPOINTS[operation.methods[0], operation.path]
        module, _, name = endpoint.partition(".")
        made = operation.declaration
        assert made.view_func is getattr(import_module(f"agentruns.api.{module}"), name)
        assert {name, made.view_func.__name__} == {operation.operation_id, operation.view_func.__name__}
        assert made.operation_id in (None, name)
        assert (made.by_alias, made.exclude_defaults, made.exclude_none) == (False, False, False)
        assert not made.is_async
        assert (made.stream_format, made.throttle_objects, made.deprecated) == (None, [], None)
    assert len(operations) == len(ENDPOINTS)


def test_our_router_takes_no_operation_of_somebody_else() -> None:
    with pytest.raises(ConfigError, match="GET /theirs is not in ENDPOINTS"):

        @router.get("/theirs")
        def theirs(request: object) -> None:
            """Return nothing."""


def test_two_mounts_share_what_is_made() -> None:
    other = NinjaAPI(urls_namespace="late")
    other.add_router("/agents", router)
    first, second = (
        {one.path: one for bound in api._get_bound_routers() for view in bound.path_operations.values()
         for one in view.operations}
        for api in (build_api(), other)
    )  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        models = [list(pool.map(lambda one: one.models, each.values())) for each in (first, second)]
    assert models[0] == models[1]
    assert all(one is not second[path] for path, one in first.items())
