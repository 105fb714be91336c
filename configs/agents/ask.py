"""An agent that knows nothing of Relax: it asks, and hands in what it heard.

Any program that reads OPENAI_BASE_URL does as well. This one needs nothing but Python, and starts quickly.
"""

import json
import os
from http.client import HTTPConnection
from urllib.parse import urlsplit

url, key = urlsplit(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"]
with open(os.environ["RELAX_TASK"]) as file:
    messages = json.load(file)["messages"]

server = HTTPConnection(url.hostname, url.port)
body = json.dumps({"model": "policy", "messages": messages})
server.request("POST", f"{url.path}/chat/completions", body, {"Authorization": f"Bearer {key}"})
answer = server.getresponse()
reply = json.load(answer)
if answer.status != 200:
    raise SystemExit(reply["error"]["message"])

with open(os.environ["RELAX_RESULT"], "w") as file:
    tokens = reply["usage"]["prompt_tokens"]
    json.dump({"answer": reply["choices"][0]["message"]["content"], "metrics": {"prompt_tokens": tokens}}, file)
