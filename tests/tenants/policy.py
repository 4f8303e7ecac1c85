"""The policy of docs/howto/tenants.md, as it stands there: the tenant of a user is what follows the @."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/howto/tenants.md"
SOURCE = PAGE.read_text().partition("```python\n# shop/policy.py\n")[2].partition("```")[0]

exec(SOURCE)  # defines Policy
