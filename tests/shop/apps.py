from django.apps import AppConfig


class ShopConfig(AppConfig):
    name = "tests.shop"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from tests import rebuild  # it imports models
        from tests.shop import releases  # noqa: F401 - agents of one release, where a process is asked for it

        if rebuild.ALWAYS:  # here, so that a test's child processes do it too
            rebuild.always()
