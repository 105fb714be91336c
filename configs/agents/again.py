"""An agent that knows nothing of Relax: it asks, and asks again when the reply is no word of the question.

Any program that reads OPENAI_BASE_URL does as well. This one needs nothing but Python, and starts quickly.
"""

import json
import os
from http.client import HTTPConnection
from urllib.parse import urlsplit

url, key = urlsplit(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"]
with open(os.environ["RELAX_TASK"]) as file:
    messages = json.load(file)["messages"]
words = messages[0]["content"].split()[1:]
server, tries = HTTPConnection(url.hostname, url.port), 0

while tries < 2:
    tries += 1
    body = json.dumps({"model": "policy", "messages": messages})
    server.request("POST", f"{url.path}/chat/completions", body, {"Authorization": f"Bearer {key}"})
    reply = json.load(server.getresponse())["choices"][0]["message"]
    if reply["content"] in words:
        break
    messages += [reply, {"role": "user", "content": "again"}]

with open(os.environ["RELAX_RESULT"], "w") as file:
    json.dump({"answer": reply["content"], "metrics": {"tries": tries}}, file)
