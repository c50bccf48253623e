"""A server of ours on a free port of this machine, in a thread of this process."""

import base64
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import openai
from PIL import Image

from subtoken_train.demo.local_server import bound_socket
from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.serving.answerer import Answerer, ContextStore
from subtoken_train.serving.chat_request import Limits
from subtoken_train.serving.http_app import ChatServer, ServerSettings, http_server
from tests.support.places import ROOT
from tests.support.run_folders import encoded

MARK = {"cache_control": {"type": "ephemeral"}}
LLAMA, LLAVA = str(ROOT / "checkpoints/tiny-llama"), str(ROOT / "checkpoints/tiny-llava")
TEXT = (ROOT / "data/samples/reference.txt").read_text()[:900]
KNORM = {"eviction": "knorm", "eviction_keep": 0.5}


@dataclass
class Served:
    url: str
    server: ChatServer
    answerer: Answerer
    model: SubTokenModel
    outcomes: list[Any]

    def client(self, **settings: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, **settings)

    def ask(self, messages: Any, **settings: Any) -> Any:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.client().chat.completions.create(
            **{"model": self.server.settings.name, "messages": messages, "max_tokens": 8} | settings
        )

    def post(self, body: Any, **headers: str) -> httpx2.Response:
        headers = {"content-type": "application/json"} | headers
        return httpx2.post(f"{self.url}/v1/chat/completions", content=body, headers=headers, timeout=60)

    def health(self) -> Any:
        return httpx2.get(f"{self.url}/health").json()

    def until_free(self, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while self.server.held:
            assert time.monotonic() < end, "a request is still held"
            time.sleep(0.01)


@contextmanager
def serving_model(
    spec: ArmSpec, limits: Limits | None = None, budget: int = 10**9, folder=None, model=None, **settings
) -> Iterator[Served]:
    model = model or spec.load("cpu")
    answerer = Answerer(model, spec, limits or Limits(), ContextStore(budget, folder))
    outcomes: list[Any] = []
    submit = answerer.submit

    def noted(job):
        def say(event):
            if not isinstance(event, str):
                outcomes.append(event)
            job_said(event)

        job_said, job.say = job.say, say
        submit(job)

    answerer.submit = noted
    server = ChatServer(answerer, ServerSettings(**{"name": "tiny"} | settings))
    with bound_socket("127.0.0.1", 0) as socket:
        running = http_server(server)
        thread = threading.Thread(target=running.run, args=([socket],))
        thread.start()
        while not running.started:
            time.sleep(0.01)
        try:
            yield Served(f"http://127.0.0.1:{socket.getsockname()[1]}", server, answerer, model, outcomes)
        finally:
            running.should_exit = True
            thread.join()
            answerer.close()


def data_url(image: Image.Image, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(encoded(image, kind)).decode()}"


def image_part(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def text_part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def about(text: str, question: str) -> list[dict[str, Any]]:
    """A question about a text that is kept."""
    return [{"role": "user", "content": [text_part(text, **MARK), text_part(question)]}]


def said(reply: Any) -> Any:
    return reply.choices[0].message.content
