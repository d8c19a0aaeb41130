"""A shared machine may stall for longer than hypothesis lets an example take."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
