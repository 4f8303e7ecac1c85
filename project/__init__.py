import os

if os.environ.get("BROKER_URL"):  # so that what rings and what works share one Celery application
    from project.celery import app as celery

    __all__ = ["celery"]
