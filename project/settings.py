"""The settings of the demo project: everything on one machine, in one folder, with one SQLite file."""

import os
from pathlib import Path

import django

BASE_DIR = Path(__file__).resolve().parent.parent

# Everything the demo writes: the database, the effects ledger, the mails. Delete it to start over.
DATA_DIR = Path(os.environ.get("AGENTRUNS_DEMO_DIR") or BASE_DIR / "var").resolve()
DATA_DIR.mkdir(parents=True, exist_ok=True)

SECRET_KEY = "demo-only: this key is public, give your own project another one"  # noqa: S105
DEBUG = os.environ.get("DEBUG", "1") not in ("", "0", "false", "no")
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "[::1]"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "ninja",  # so that its docs page loads nothing from another host
    "agentruns",
    "project.helpdesk",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "project.urls"
WSGI_APPLICATION = "project.wsgi.application"
ASGI_APPLICATION = "project.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
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

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": DATA_DIR / "demo.sqlite3",
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL",
        },
    }
}

STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
    # The files of large tool results, private: only the console and the API serve them.
    "agentruns": {
        "BACKEND": "django.core.files.storage.FileSystemStorage",
        "OPTIONS": {"location": DATA_DIR / "payloads", "file_permissions_mode": 0o600},
    },
}

LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_TZ = True

STATIC_URL = "static/"
FIXTURE_DIRS = [BASE_DIR / "fixtures"]

# With a broker, Celery workers drive the runs; without a broker, `resume_runs --watch` drives them.
if BROKER_URL := os.environ.get("BROKER_URL"):
    AGENTRUNS_DISPATCHER = "agentruns.tasks.CeleryDispatcher"
    CELERY_BROKER_URL = BROKER_URL
    CELERY_BEAT_SCHEDULE = {"sweep": {"task": "agentruns.sweep_runs", "schedule": 10.0}}

# Mails are written to files in this folder.
MAIL_BACKEND, MAIL_DIR = "django.core.mail.backends.filebased.EmailBackend", DATA_DIR / "mail"
if django.VERSION >= (6, 1):
    MAILERS = {"default": {"BACKEND": MAIL_BACKEND, "OPTIONS": {"file_path": MAIL_DIR}}}
else:
    EMAIL_BACKEND, EMAIL_FILE_PATH = MAIL_BACKEND, MAIL_DIR
DEFAULT_FROM_EMAIL = "Kettle & Cup <help@kettle-and-cup.example>"

if django.VERSION >= (6, 0):
    from django.utils.csp import CSP

    MIDDLEWARE.insert(1, "django.middleware.csp.ContentSecurityPolicyMiddleware")
    SECURE_CSP = {
        "default-src": [CSP.SELF],
        "img-src": [CSP.SELF, "data:"],
        "base-uri": [CSP.NONE],
        "form-action": [CSP.SELF],
        "frame-ancestors": [CSP.NONE],
    }

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["console"], "level": "WARNING"},
    # No line for each request and each missing favicon, which would bury the worker's output.
    "loggers": {
        "django.server": {"handlers": ["console"], "level": "ERROR", "propagate": False},
        "django.request": {"level": "ERROR"},
    },
}

# Short, so that a takeover happens quickly. The defaults (60 and 20) suit most projects.
AGENTRUNS_LEASE_SECONDS = 3
AGENTRUNS_HEARTBEAT_SECONDS = 1

# Prices for a million tokens of the transcripts, as if they were a real model's.
AGENTRUNS_PRICES = {"scripted": {"input": 3, "output": 15}}
AGENTRUNS_CURRENCY = "EUR"
