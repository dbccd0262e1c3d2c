"""What operators use: request ids, health, metrics, logs, CORS, the OpenAPI document, settings."""

from __future__ import annotations

import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from openai_proxy.logs import JsonFormatter
from openai_proxy.settings import ProxySettings
from tests.proxy.fakes import MODEL, FakeSession, Reply, eventually, running_proxy
from tests.waiting import PATIENCE
from tridentlm.errors import InvalidRequest, Overloaded

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hi"}]}


def test_a_sane_request_id_is_echoed_on_every_response(http: httpx.Client) -> None:
    given = {"x-request-id": "trace-1/abc:9"}
    for response in (
        http.post(CHAT, json=ASK, headers=given),
        http.post(CHAT, json=ASK | {"stream": True}, headers=given),
        http.post(CHAT, json={}, headers=given),
        http.get("/nothing", headers=given),
        http.get("/v1/models", headers=given),
        http.get("/metrics", headers=given),
    ):
        assert response.headers.get_list("x-request-id") == ["trace-1/abc:9"]


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, 'a"b'])
def test_other_request_ids_are_replaced(http: httpx.Client, given: str) -> None:
    ids = {
        http.get("/version", headers={"x-request-id": given}).headers["x-request-id"]
        for _ in range(2)
    }
    assert len(ids) == 2
    assert all(made.startswith("req-") for made in ids)


def test_what_can_be_got_has_a_head(http: httpx.Client) -> None:
    """Monitors and load balancers ask so."""
    for path in ("/health", "/health/live", "/v1/models", "/metrics", "/version"):
        head, whole = http.head(path), http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert http.head(CHAT).status_code == 405
    assert http.head("/nothing").status_code == 404


def test_health_and_version(http: httpx.Client) -> None:
    assert http.get("/health/live").json() == {"status": "live"}
    assert http.get("/health/ready").json() == {"status": "ready"}
    assert http.get("/health").json() == {"status": "ready"}
    assert http.get("/version").json() == {"version": "0.1.0", "engine_version": "9.9"}


def test_models_keep_their_created(http: httpx.Client) -> None:
    first, second = (http.get(f"/v1/models/{MODEL}").json() for _ in range(2))
    assert first == second
    assert first["object"] == "model"
    assert http.get("/v1/models").json() == {"object": "list", "data": [first]}


def samples(text: str) -> dict[str, float]:
    """Every sample by its name and labels; fails on anything that Prometheus could not read."""
    return {
        f"{s.name}{sorted(s.labels.items())}": s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_metrics_count_requests_by_route_and_status(
    http: httpx.Client, session: FakeSession
) -> None:
    ok = f"tridentlm_proxy_requests_total[('route', '{CHAT}'), ('status', '200')]"
    refused = ok.replace("200", "503")
    ttft = f"tridentlm_proxy_time_to_first_token_seconds_count[('route', '{CHAT}')]"
    before = samples(http.get("/metrics").text)
    http.post(CHAT, json=ASK)
    http.post(CHAT, json=ASK | {"stream": True})
    session.reply = lambda s: Reply(refusal=Overloaded("full"))
    http.post(CHAT, json=ASK)
    after = samples(http.get("/metrics").text)
    assert after[ok] - before.get(ok, 0) == 2
    assert after[refused] - before.get(refused, 0) == 1
    assert after[ttft] - before.get(ttft, 0) == 2
    in_flight = "tridentlm_proxy_requests_in_flight[]"
    # Requests whose clients have left, in the test before, may end a moment later.
    eventually(lambda: samples(http.get("/metrics").text)[in_flight] == 1)


def test_unknown_paths_share_one_label(http: httpx.Client) -> None:
    http.get("/some/random/path")
    text = http.get("/metrics").text
    assert "random" not in text
    assert 'route="other",status="404"' in text


def test_engine_up_and_ready_follow_the_session(http: httpx.Client, session: FakeSession) -> None:
    for ready in (True, False):
        session.ready = ready
        found = samples(http.get("/metrics").text)
        assert found["tridentlm_engine_up[]"] == found["tridentlm_proxy_ready[]"] == ready


class TritonMetrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"# TYPE tridentlm_engine_up gauge\ntridentlm_engine_up 1\n# TYPE nv_x gauge\nnv_x 7"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_tritons_metrics_are_merged_in() -> None:
    with HTTPServer(("127.0.0.1", 0), TritonMetrics) as triton:
        threading.Thread(target=triton.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{triton.server_port}/metrics"
        with running_proxy(triton_metrics=url) as proxy:
            text = httpx.get(f"{proxy.url}/metrics", timeout=PATIENCE).text
        triton.shutdown()
    found = samples(text)
    assert found["nv_x[]"] == 7
    assert found["tridentlm_engine_up[]"] == 1
    assert text.count("TYPE tridentlm_engine_up ") == 1
    assert "tridentlm_proxy_requests_in_flight[]" in found


def test_metrics_are_there_without_triton() -> None:
    with running_proxy(triton_metrics="http://127.0.0.1:9/metrics") as proxy:
        found = samples(httpx.get(f"{proxy.url}/metrics", timeout=PATIENCE).text)
    assert found["tridentlm_engine_up[]"] == 1


def logged(caplog: pytest.LogCaptureFixture, request_id: str) -> list[logging.LogRecord]:
    """A request's access lines; those of the test before may still come."""
    return [r for r in caplog.records if f"request_id={request_id} " in r.getMessage()]


def test_the_access_log_has_one_line_per_request_with_its_id(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "openai_proxy.access"):
        http.post(CHAT, json=ASK | {"stream": True}, headers={"x-request-id": "abc"})
        eventually(lambda: logged(caplog, "abc"))
    [record] = logged(caplog, "abc")
    line = orjson.loads(JsonFormatter().format(record))
    assert line["request_id"] == "abc"
    assert (line["path"], line["status"], line["error"]) == (CHAT, 200, None)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (5, 2)
    assert 0 < line["ttft_ms"] <= line["ms"]


def test_an_error_is_named_in_the_access_log(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "openai_proxy.access"):
        http.get("/nothing", headers={"x-request-id": "one"})
        http.post(CHAT, json=ASK | {"model": "other"}, headers={"x-request-id": "two"})
        eventually(lambda: logged(caplog, "one") and logged(caplog, "two"))
    assert "error=unknown_url" in logged(caplog, "one")[0].getMessage()
    assert "error=model_not_found" in logged(caplog, "two")[0].getMessage()


def test_cors_answers_preflights_without_a_key_and_marks_errors() -> None:
    with running_proxy(cors_origins="https://a.example, https://b.example", api_key="k") as proxy:
        origin = {"origin": "https://b.example"}
        asks = {"access-control-request-method": "POST"}
        preflight = httpx.options(f"{proxy.url}{CHAT}", headers=origin | asks, timeout=PATIENCE)
        assert preflight.status_code == 200
        refused = httpx.post(f"{proxy.url}{CHAT}", json=ASK, headers=origin, timeout=PATIENCE)
        assert refused.status_code == 401
        for response in (preflight, refused):
            assert response.headers["access-control-allow-origin"] == "https://b.example"
        key = {"authorization": "Bearer k"}
        streaming = ASK | {"stream": True}
        events = httpx.post(
            f"{proxy.url}{CHAT}", json=streaming, headers=origin | key, timeout=PATIENCE
        )
        assert events.headers["access-control-allow-origin"] == "https://b.example"
        assert events.text.endswith("data: [DONE]\n\n")


def test_the_openapi_document_describes_the_posts(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path, request, response in (
        (CHAT, "ChatCompletionRequest", "ChatCompletion"),
        ("/v1/completions", "CompletionRequest", "Completion"),
    ):
        post = document["paths"][path]["post"]
        asked = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        answered = post["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
        assert asked == f"#/components/schemas/{request}"
        assert answered == f"#/components/schemas/{response}"
    assert "messages" in schemas["ChatCompletionRequest"]["required"]
    refs = {part.split('"')[0] for part in http.get("/openapi.json").text.split("schemas/")[1:]}
    assert refs <= set(schemas)


def test_documented_fields_are_the_served_ones(http: httpx.Client) -> None:
    from openai_proxy.protocol import CHAT_FIELDS, COMPLETION_FIELDS

    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert set(schemas["ChatCompletionRequest"]["properties"]) == CHAT_FIELDS
    assert set(schemas["CompletionRequest"]["properties"]) == COMPLETION_FIELDS


def test_settings_come_from_keywords_then_both_environments_then_defaults() -> None:
    environ = {
        "TRIDENTLM_PROXY_PORT": "1",
        "TRIDENTLM_PORT": "2",
        "TRIDENTLM_API_KEY": "k",
        "TRIDENTLM_PROXY_LOG_JSON": "true",
        "TRIDENTLM_TIMEOUT": "2.5",
    }
    settings = ProxySettings.from_environment(environ, host="h", timeout=None)
    assert (settings.host, settings.port, settings.api_key) == ("h", 1, "k")
    assert (settings.log_json, settings.timeout, settings.workers) == (True, 2.5, 1)
    assert ProxySettings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    ("environ", "param"),
    [
        ({"TRIDENTLM_PROXY_PORT": "eighty"}, "port"),
        ({"TRIDENTLM_PROXY_TLS": "maybe"}, "tls"),
        ({"TRIDENTLM_PROXY_WORKERS": "0"}, "workers"),
        ({"TRIDENTLM_PROXY_TIMEOUT": "-1"}, "timeout"),
        ({"TRIDENTLM_PROXY_TLS_CERT": "a.pem"}, "tls_cert"),
        ({"TRIDENTLM_PROXY_MAX_BODY_MB": "0"}, "max_body_mb"),
        ({"TRIDENTLM_PROXY_TLS_CA": "/no/such/file.pem"}, "tls_ca"),
    ],
)
def test_bad_settings_are_refused_by_name(environ: dict[str, str], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ProxySettings.from_environment(environ)
    assert caught.value.param == param
