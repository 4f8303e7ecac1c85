import os

if os.environ.get("BROKER_URL"):  # so that web processes and workers share one Celery application
    from project.celery import app as celery

    __all__ = ["celery"]
