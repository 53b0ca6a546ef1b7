"""A double of Kubernetes's API server: it keeps jobs and pods, checks jobs by their schemas when asked to be strict, and speaks HTTP."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.k8s.schemas import schema_faults

PLURALS = {
    "apis/jobset.x-k8s.io/v1alpha2": "jobsets",
    "apis/trainer.kubeflow.org/v1alpha1": "trainjobs",
    "apis/ray.io/v1": "rayjobs",
}


class ApiServer:
    """The server's state: objects by (path of their API, namespace, name), pods, and what was asked."""

    def __init__(self):
        self.installed = set(PLURALS)
        self.objects, self.pods, self.logs, self.asked = {}, [], {}, []
        self.forbidden = False
        self.more = threading.Event()

    def answer(self, method, path, query, body):
        """Returns the status and the body of the answer."""
        self.asked.append((method, path, query))
        if self.forbidden:
            return 403, refusal(403, "Forbidden", "you may not do this")
        api, _, rest = path.partition("/namespaces/")
        namespace, *names = rest.split("/")
        if api == "api/v1" and names[:1] == ["pods"]:
            return self.of_pods(namespace, names[1:], query)
        if api not in self.installed or names[:1] != [PLURALS[api]]:
            return 404, "404 page not found\n"
        return self.of_jobs(method, (api, namespace), names[1:], query, body)

    def of_jobs(self, method, place, names, query, body):
        if method == "POST":
            found = schema_faults(body) if query.get("fieldValidation") == ["Strict"] else []
            if found:
                return 422, refusal(422, "Invalid", "; ".join(found))
            name = body["metadata"]["name"]
            if (*place, name) in self.objects:
                return 409, refusal(409, "AlreadyExists", f"{name} already exists")
            if query.get("dryRun") != ["All"]:
                self.objects[*place, name] = body
            return 201, body
        if (*place, *names) not in self.objects:
            return 404, refusal(404, "NotFound", f"{names[0]} not found")
        if method == "DELETE":
            del self.objects[*place, *names]
            return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        return 200, self.objects[*place, *names]

    def of_pods(self, namespace, names, query):
        if not names:
            wanted = dict(pair.split("=") for pair in query["labelSelector"][0].split(","))
            found = [
                pod
                for pod in self.pods
                if pod["metadata"]["namespace"] == namespace and wanted.items() <= pod["metadata"]["labels"].items()
            ]
            return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": found}
        assert names[1] == "log"
        lines = self.logs[names[0], query["container"][0]]
        tail = int(query.get("tailLines", [len(lines)])[0])
        return 200, "".join(f"{line}\n" for line in lines[-tail:])


def refusal(code, reason, text):
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": text}


def pod(name, labels, *, phase="Running", annotations=None, containers=({"name": "main"},), created="2026-01-01T00:00:00Z", code=None):
    """A pod as the server tells it."""
    about = {"name": name, "namespace": "default", "labels": labels, "annotations": annotations or {}, "creationTimestamp": created}
    state = {"terminated": {"exitCode": code}} if code is not None else {"running": {}}
    status = [{"name": one["name"], "image": "i", "imageID": "", "ready": True, "restartCount": 0, "state": state} for one in containers]
    spec = {"containers": [{"image": "i", **one} for one in containers]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec, "status": {"phase": phase, "containerStatuses": status}}


@contextmanager
def serving(server, folder):
    """Runs the double; yields a kubeconfig that leads to it."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self):
            parts = urlsplit(self.path)
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            query = parse_qs(parts.query)
            code, found = server.answer(self.command, parts.path.strip("/"), query, body)
            if query.get("follow") == ["True"] or query.get("follow") == ["true"]:
                self.send_lines(found.splitlines(keepends=True))
                return
            kind, data = ("text/plain", found) if isinstance(found, str) else ("application/json", json.dumps(found))
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data.encode())))
            self.end_headers()
            self.wfile.write(data.encode())

        def send_lines(self, lines):
            """Sends each line when it is there: the second and later ones when the test says so."""
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for number, line in enumerate([*lines, ""]):
                if number:
                    server.more.wait(30)
                self.wfile.write(f"{len(line):x}\r\n{line}\r\n".encode())
                self.wfile.flush()

        do_GET = do_POST = do_DELETE = reply  # noqa: N815  # the names that the library looks for

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "double",
        "clusters": [{"name": "double", "cluster": {"server": f"http://127.0.0.1:{http.server_port}"}}],
        "users": [{"name": "user", "user": {"token": "t"}}],
        "contexts": [
            {"name": "double", "context": {"cluster": "double", "user": "user"}},
            {"name": "research", "context": {"cluster": "double", "user": "user", "namespace": "research"}},
        ],
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    try:
        yield path
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
