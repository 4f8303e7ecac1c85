"""What host projects share: test databases that are not those of the test which started them."""

import os

from tests.settings import *  # noqa: F403
from tests.settings import DATABASE, DATABASES

if DATABASE == "postgres":
    for _alias, _database in DATABASES.items():
        _database["TEST"] = {"NAME": f"host_{os.getpid()}_{_alias}"}
