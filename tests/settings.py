"""A host project that is not ours: proves that agentruns needs nothing but INSTALLED_APPS."""

import os
from pathlib import Path
from typing import Any

from tests import scratch
from tests.waiting import LIMIT

# As docs/databases.md has it for production: every other process of a test run connects so,
# the rest as Django does by itself.
PREPARED = {"prepare_threshold": 5, "server_side_binding": True}

DATABASE = os.environ.get("AGENTRUNS_TEST_DATABASE", "sqlite")
# Set by `make test`: short examples, and each case of a product on one of the databases only.
BRIEF = bool(os.environ.get("AGENTRUNS_TEST_BRIEF"))


def sqlite(name: str) -> dict[str, Any]:
    """Return a database in a file: threads and child processes share it, memory they cannot."""
    file = Path(scratch.folder()) / f"agentruns-{os.getpid()}-{name}.sqlite3"
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": ":memory:",
        "TEST": {"NAME": str(file)},
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": LIMIT,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL",
        },
    }


def postgres(name: str) -> dict[str, Any]:
    """Return a database on the server that `python -m tests.servers` started."""
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": name,
        "HOST": os.environ["AGENTRUNS_TEST_PG_HOST"],
        "PORT": os.environ["AGENTRUNS_TEST_PG_PORT"],
        "USER": os.environ["AGENTRUNS_TEST_PG_USER"],
        "OPTIONS": PREPARED if os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "13579" else {},
    }


database = {"sqlite": sqlite, "postgres": postgres}[DATABASE]
NAME = os.environ.get("AGENTRUNS_TEST_NAME", "agentruns")  # of two test runs on one server
DATABASES = {"default": database(NAME), "other": database(f"{NAME}_other")}

# A child process of a test works on the test's own database.
if name := os.environ.get("AGENTRUNS_TEST_DB_NAME"):
    DATABASES["default"]["NAME"] = name

SECRET_KEY = "only for tests"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # the others are slow on purpose
USE_TZ = True
ROOT_URLCONF = "tests.urls"
STATIC_URL = "static/"

INSTALLED_APPS = [
    "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes",
    "django.contrib.sessions", "django.contrib.messages", "django.contrib.staticfiles", "agentruns",
    "tests.shop",
]  # fmt: skip

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

# A Celery worker of a test, and the test itself where it rings one.
CELERY_BROKER_URL = os.environ.get("AGENTRUNS_TEST_BROKER", "redis+socket:///nowhere")
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
if os.environ.get("AGENTRUNS_TEST_BROKER"):
    AGENTRUNS_DISPATCHER = "agentruns.tasks.CeleryDispatcher"

# Of Django's tasks; only tests/workers/test_django_tasks.py enqueues any.
INSTALLED_APPS.append("django_tasks_db")
TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}}

# Short enough that a test may wait for a dead worker's lease to run out.
AGENTRUNS_LEASE_SECONDS = float(os.environ.get("AGENTRUNS_TEST_LEASE", "60"))
AGENTRUNS_HEARTBEAT_SECONDS = AGENTRUNS_LEASE_SECONDS / 4
AGENTRUNS_PAYLOAD_TIMEOUT = 300  # however slow the machine
