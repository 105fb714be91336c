"""An agent that knows nothing of Relax: it asks, and asks again. Any program that reads OPENAI_BASE_URL does as well."""

import json
import os
from http.client import HTTPConnection
from urllib.parse import urlsplit

url, key = urlsplit(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"]
with open(os.environ["RELAX_TASK"]) as file:
    messages = json.load(file)["messages"]
server = HTTPConnection(url.hostname, url.port)

for more in ({"role": "user", "content": "again"}, None):
    body = json.dumps({"model": "policy", "messages": messages})
    server.request("POST", f"{url.path}/chat/completions", body, {"Authorization": f"Bearer {key}"})
    messages += [json.load(server.getresponse())["choices"][0]["message"], *([more] if more else [])]

with open(os.environ["RELAX_RESULT"], "w") as file:
    json.dump({"answer": messages[-1]["content"], "metrics": {"same": messages[-1] == messages[-3]}}, file)
