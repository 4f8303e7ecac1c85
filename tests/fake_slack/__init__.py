"""A strict stand-in for Slack on 127.0.0.1: its Web API, and the requests that it sends for a press."""

from tests.fake_slack.fake import FakeSlack

__all__ = ["FakeSlack"]
