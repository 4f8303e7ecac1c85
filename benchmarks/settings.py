"""A host project that has agentruns and nothing else to do; `benchmarks.systems.ours` says which database."""

import os
from typing import Any

PLACE = os.environ.get("BENCHMARK_DATABASE", ":memory:")


def postgresql() -> dict[str, Any]:
    """Return a database named by a libpq URL."""
    from psycopg.conninfo import conninfo_to_dict

    found = conninfo_to_dict(PLACE)
    options = {}
    if os.environ.get("BENCHMARK_PREPARED"):  # as docs/databases.md has it for production
        options = {"prepare_threshold": 5, "server_side_binding": True}
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": found["dbname"],
        "HOST": found["host"],
        "PORT": found.get("port", ""),
        "USER": found.get("user", ""),
        "CONN_MAX_AGE": None,
        "OPTIONS": options,
    }


def sqlite() -> dict[str, Any]:
    """Return a database in a file, or in memory."""
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": PLACE,
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL",
        },
    }


IS_PLAIN = bool(os.environ.get("BENCHMARK_PLAIN"))  # without agentruns, to compare with

DATABASES = {"default": postgresql() if PLACE.startswith("postgres") else sqlite()}
SECRET_KEY = "only for benchmarks"
USE_TZ = True
AGENTRUNS_PAYLOAD_STORAGE = ""  # the payloads are small: none leaves the database
ROOT_URLCONF = "benchmarks.urls"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    *([] if IS_PLAIN else ["agentruns"]),
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
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
