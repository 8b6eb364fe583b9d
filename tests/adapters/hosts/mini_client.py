"""mini-swe-agent's lightest client of a chat API, pointed at `MODEL_URL`."""

from __future__ import annotations

import os

from minisweagent.models.openrouter_model import OpenRouterModel


class Client(OpenRouterModel):
    def __init__(self, **settings):
        super().__init__(**settings)
        self._api_url = f"{os.environ['MODEL_URL']}/chat/completions"
