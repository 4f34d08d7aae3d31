"""Dockerfile and deploy/: what can be checked without building an image or having a cluster."""

import http.server
import importlib.util
import json
import os
import re
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from referencing import Registry, Resource

from benchmarks.reliability.rolling_restart import NGINX_MAIN
from prelunet.evaluator.client import Client, Credentials
from prelunet.evaluator.machine import parse_memory
from prelunet.evaluator.serving.api.health import LIVENESS
from prelunet.evaluator.serving.http.metrics import METRICS_CLOSE_TIMEOUT
from prelunet.evaluator.serving.lifecycle import CLOSE_TIMEOUT
from prelunet.evaluator.serving.observability.tracing import TRACING_CLOSE_TIMEOUT
from prelunet.evaluator.serving.options import ServeOptions
from prelunet.evaluator.serving.server import CONNECTION_LINGER, REFUSAL_PERIOD
from tests.helpers.tls_files import TLS, secret_file, tls_options, write_tokens
from tests.serving.conftest import Served
from tests.serving.serving_harness import eventually, png
from tests.serving.test_serving_process import model, serving  # noqa: F401 - `model` is a fixture

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CUSTOM_RESOURCES = ROOT / "tests" / "data" / "kubernetes" / "custom-resources.schema.json"
PROMETHEUS, DASHBOARD = DEPLOY / "prometheus", DEPLOY / "grafana" / "dashboards" / "prelunet.json"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
OLDEST, NEWEST = "v1.27.0", "v1.37.0"  # the first has gRPC probes for good
# Seconds that a stop takes beside --lame-duck and --grace.
CLOSING = 2 * REFUSAL_PERIOD + CONNECTION_LINGER + METRICS_CLOSE_TIMEOUT + TRACING_CLOSE_TIMEOUT + CLOSE_TIMEOUT
Json = dict[str, Any]


def read_yaml(path: Path) -> list[Any]:
    """Return the documents of a YAML file."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


@cache
def manifests(folder: str = "base") -> list[Json]:
    """Return the objects that kubectl makes of a folder of deploy/kubernetes; skips the test without kubectl."""
    kubectl = shutil.which("kubectl", path=f"{os.environ.get('PATH', '')}:{ROOT}/.kubectl")
    if kubectl is None:
        pytest.skip("kubectl is missing: make .kubectl/kubectl")
    words = [kubectl, "kustomize", str(DEPLOY / "kubernetes" / folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def deployment(*, tls: bool = False) -> Json:
    (found,) = (each for each in manifests("tls" if tls else "base") if each["kind"] == "Deployment")
    return found


def pod(*, tls: bool = False) -> Json:
    spec: Json = deployment(tls=tls)["spec"]["template"]["spec"]
    return spec


def container(*, tls: bool = False) -> Json:
    (found,) = pod(tls=tls)["containers"]
    return dict(found)


def kserve(name: str) -> Json:
    (document,) = read_yaml(DEPLOY / "kserve" / f"{name}.yaml")
    return dict(document)


def compose() -> Json:
    (document,) = read_yaml(DEPLOY / "compose.yaml")
    return dict(document)


@pytest.fixture
def image_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables of the Dockerfile that are options."""
    for name, value in re.findall(r"(PRELUNET_SERVE_\w+)=(\S+)", DOCKERFILE):
        monkeypatch.setenv(name, value)


# Kubernetes


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_the_manifests_follow_the_schemas_of_kubernetes_kserve_and_prometheus(version: str) -> None:
    package = importlib.util.find_spec("kubernetes_validate")
    if package is None or package.origin is None:
        pytest.skip("kubernetes-validate, which holds the schemas, is not installed: pip install '.[dev]'")
    folder = Path(package.origin).parent / "kubernetes-json-schema" / f"{version}-local-strict"
    definitions = Resource.from_contents(json.loads((folder / "_definitions.json").read_text()))
    custom = json.loads(CUSTOM_RESOURCES.read_text(encoding="utf-8"))
    for each in (
        *manifests(),
        *manifests("tls"),
        *manifests("autoscaled"),
        kserve("runtime"),
        kserve("inference-service"),
    ):
        group, _, number = each["apiVersion"].rpartition("/")
        name = "-".join(filter(None, (each["kind"].lower(), group.partition(".")[0], number)))
        if each["kind"] in custom["$defs"]:
            schema = {**custom, "$ref": f"#/$defs/{each['kind']}"}
        else:
            schema = json.loads((folder / f"{name}.json").read_text())
        registry = Resource.from_contents(schema) @ (definitions @ Registry())
        jsonschema.Draft202012Validator(schema, registry=registry).validate(each)


@pytest.mark.parametrize("tls", [False, True])
def test_the_server_of_the_deployment_starts_with_its_arguments_and_has_time_to_drain(
    served: Served, image_environment: None, tls: bool
) -> None:
    options = served(*container(tls=tls)["args"])
    require_time_to_drain(options, pod()["terminationGracePeriodSeconds"])
    assert options.access.insecure is not tls
    assert (options.access.tls_cert is None) is not tls
    assert (options.access.token_file is None) is not tls
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {"grpc": options.port, "http": options.http.port, "metrics": options.metrics_port}
    mounts = [mount["mountPath"] for mount in container(tls=tls)["volumeMounts"]]
    require_mounts(options, mounts)
    limits = container()["resources"]["limits"]
    require_memory(options, limits["memory"].removesuffix("i"))
    assert {mount["name"] for mount in container(tls=tls)["volumeMounts"]} == {
        volume["name"] for volume in pod(tls=tls)["volumes"]
    }


def require_mounts(options: ServeOptions, folders: Collection[str]) -> None:
    """Models lie in NAME/VERSION/ everywhere, as the pages build them."""
    assert str(options.models_folder) in folders
    assert not options.models
    files = [*options.access.tls_files, *filter(None, [options.access.token_file])]
    assert all(str(file.parent) in folders for file in files)


def require_memory(options: ServeOptions, container: str) -> None:
    """A container has room for what the limit does not count, and for a dense ResNet-18 and its next version: 3.7G."""
    limit, whole = options.placement.memory, parse_memory(container)
    assert limit is not None
    assert whole is not None
    assert 3.7 * 2**30 <= limit <= whole - 2**30


def require_time_to_drain(options: ServeOptions, seconds: float) -> None:
    need = options.lame_duck + options.grace + CLOSING
    assert need <= seconds, f"the server takes up to {need} s to stop"


def test_probes_ask_grpc_health_without_tls_and_the_metrics_port_with_it(served: Served) -> None:
    options = served(*container()["args"])
    services = {"startupProbe": {}, "readinessProbe": {}, "livenessProbe": {"service": LIVENESS}}
    for name, service in services.items():
        assert container()[name]["grpc"] == {"port": options.port, **service}, "no name: the whole server"
        path = f"/{service.get('service', 'ready')}"
        assert container(tls=True)[name]["httpGet"] == {"path": path, "port": "metrics"}
    ready, live = container()["readinessProbe"], container()["livenessProbe"]
    assert ready["periodSeconds"] * ready["failureThreshold"] < options.lame_duck, "found before calls are refused"
    assert live["periodSeconds"] * live["failureThreshold"] > options.lame_duck + options.grace


def test_the_pod_has_no_rights_and_writes_nothing() -> None:
    security, spec = container()["securityContext"], pod()
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert spec["securityContext"]["runAsNonRoot"]
    assert f"USER {spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}\n" in DOCKERFILE
    assert not spec["automountServiceAccountToken"]
    assert not spec["enableServiceLinks"]
    assert all(mount["readOnly"] for mount in container(tls=True)["volumeMounts"])


def test_services_budget_and_policy_select_the_pods_and_name_their_ports(served: Served) -> None:
    labels, ports = deployment()["spec"]["template"]["metadata"]["labels"], {p["name"] for p in container()["ports"]}
    for each in manifests():
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            assert spec["selector"] == labels
            assert {port["targetPort"] for port in spec["ports"]} <= ports
        elif each["kind"] in {"Deployment", "PodDisruptionBudget"}:
            assert spec["selector"] == {"matchLabels": labels}
        elif each["kind"] == "NetworkPolicy":
            assert spec["podSelector"] == {"matchLabels": labels}
            assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} == ports
    services = {each["metadata"]["name"]: each["spec"] for each in manifests() if each["kind"] == "Service"}
    assert services["prelunet"]["clusterIP"] == "None", "headless: clients see every pod"
    name = f"prelunet-http.{deployment()['metadata']['namespace']}.svc.cluster.local".split(".")
    names = tuple(".".join(name[:count]) for count in (1, 2, 3, 5))
    assert served(*container()["args"]).http.host_names == names, "HTTP refuses other names"


# KServe


def test_the_runtime_of_kserve_serves_an_inference_service_and_stops_within_kubernetes_own_period(
    served: Served, image_environment: None
) -> None:
    spec, service = kserve("runtime")["spec"], kserve("inference-service")
    (found,) = spec["containers"]
    name, chosen = service["metadata"]["name"], service["spec"]["predictor"]["model"]
    filled = [each.replace("{{.Name}}", name).replace("{{.Namespace}}", "default") for each in found["args"]]
    assert not any("{" in each for each in filled)
    options = served(*filled)
    require_time_to_drain(options, 30)
    require_memory(options, found["resources"]["limits"]["memory"].removesuffix("i"))
    assert [(each.name, str(each.path)) for each in options.models] == [(name, "/mnt/models/model.onnx")]
    assert [port["containerPort"] for port in found["ports"]] == [options.http.port]
    assert found["readinessProbe"]["httpGet"] == {"path": "/v2/health/ready", "port": options.http.port}
    assert spec["annotations"]["prometheus.kserve.io/port"] == str(options.metrics_port)
    assert chosen["protocolVersion"] in spec["protocolVersions"]
    assert chosen["modelFormat"]["name"] in {each["name"] for each in spec["supportedModelFormats"]}
    assert {f"{name}-predictor", "*.default.svc"} <= set(options.http.host_names)


# Autoscaling


def test_the_autoscaler_reads_a_metric_that_the_monitor_collects_and_the_adapter_hands_over(served: Served) -> None:
    found = {each["kind"]: each for each in manifests("autoscaled") if each["kind"] != "Service"}
    (metric,) = found["HorizontalPodAutoscaler"]["spec"]["metrics"]
    (rule,) = adapter_rules()
    assert rule["seriesQuery"].partition("{")[0] == metric["pods"]["metric"]["name"]
    target, spec = found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"], found["Deployment"]["spec"]
    assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": found["Deployment"]["metadata"]["name"]}
    assert "replicas" not in spec, "kubectl apply would set them again"
    (container,) = spec["template"]["spec"]["containers"]
    assert served(*container["args"]).limits.max_connection_age, "or gRPC clients never find new servers"
    (endpoint,) = found["ServiceMonitor"]["spec"]["endpoints"]
    wanted = found["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items()
    services = [each for each in manifests("autoscaled") if each["kind"] == "Service"]
    chosen = [each for each in services if wanted <= each["metadata"].get("labels", {}).items()]
    assert [port["name"] for each in chosen for port in each["spec"]["ports"]].count(endpoint["port"]) == 1


# Docker


def test_the_options_of_compose_are_accepted_and_it_waits_for_the_drain(
    served: Served, image_environment: None
) -> None:
    server = compose()["services"]["server"]
    options = served(*server["command"])
    require_time_to_drain(options, float(server["stop_grace_period"].removesuffix("s")))
    assert [int(port.rpartition(":")[2]) for port in server["ports"]] == [options.port, options.http.port]
    assert all(port.startswith("127.0.0.1:") for port in server["ports"]), "it has neither TLS nor tokens"
    require_mounts(options, [volume.rpartition("}:")[2].removesuffix(":ro") for volume in server["volumes"]])
    require_memory(options, server["mem_limit"])
    assert server["read_only"]
    assert server["cap_drop"] == ["ALL"]
    (prometheus,) = read_yaml(PROMETHEUS / "prometheus.yml")
    (job,) = prometheus["scrape_configs"]
    assert job["dns_sd_configs"] == [{"names": ["server"], "type": "A", "port": options.metrics_port}]


@pytest.mark.parametrize("page", ["Dockerfile", "docs/operations.md"])
def test_a_documented_container_gets_accepted_options_its_files_and_publishes_its_ports(
    served: Served, image_environment: None, page: str
) -> None:
    """Its user is the one who made the keys, which nobody else can read."""
    text = re.sub(r"\\\n#?", "", (ROOT / page).read_text(encoding="utf-8"))
    runs = re.findall(r"docker run (.*) prelunet:cpu (--.*)", text)
    assert runs
    for docker, arguments in runs:
        options = served(*arguments.split())
        ports = [options.port, options.http.port, options.metrics_port]
        assert [int(port) for port in re.findall(r"-p (?:\S+:)?\d+:(\d+)", docker)] == ports
        assert all(each.startswith("127.0.0.1:") or options.access.tls_cert for each in re.findall(r"-p (\S+)", docker))
        require_mounts(options, re.findall(r"-v \S+:(\S+):ro", docker))
        assert ('--user "$(id -u):$(id -g)"' in docker) is (options.access.tls_key is not None)
        if memory := re.findall(r"--memory (\S+)", docker):
            require_memory(options, memory[0])
            require_time_to_drain(options, float(re.findall(r"--stop-timeout (\d+)", docker)[0]))
        assert re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE) == [" ".join(map(str, ports))]


@pytest.fixture
def probed() -> Iterator[Callable[[int | None], int]]:
    """Return a function that runs the health check against a port that answers with a status, or does not answer."""
    command = json.loads(re.findall(r"HEALTHCHECK .*\\\n +CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[0])
    status = 0

    class Port(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/ready" else 404)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Port) as port:
        threading.Thread(target=port.serve_forever, daemon=True).start()

        def run(answer: int | None) -> int:
            nonlocal status
            if answer is None:
                port.shutdown()
                port.socket.close()
            else:
                status = answer
            variables = {**os.environ, "PRELUNET_SERVE_METRICS_PORT": str(port.server_port)}
            return subprocess.run(command, env=variables, capture_output=True, timeout=20, check=False).returncode

        yield run


def test_the_health_check_of_the_image_passes_only_if_the_server_is_ready(
    probed: Callable[[int | None], int],
) -> None:
    assert [probed(answer) for answer in (200, 503, 200, None)] == [0, 1, 0, 1]


# Metrics


@pytest.fixture(scope="module")
def exported_series(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, dict[str, str]]]:  # noqa: F811
    """Return what a server exports (names and labels) that runs with TLS and tokens and has answered a call."""
    folder = tmp_path_factory.mktemp("exported")
    tls_options(folder)
    (secret,) = write_tokens(folder / "tokens.toml", ("alice", ("classify",)))
    options = ["--tls-cert", f"{folder}/tls.pem", "--tls-key", f"{folder}/tls.key"]
    options += ["--token-file", f"{folder}/tokens.toml", "--metrics-port", "0", "--lame-duck", "0"]
    with serving(model, *options) as (_, line, address):
        credentials = Credentials(tls_ca=TLS / "ca.pem", token_file=secret_file(folder / "token", secret))
        with Client(f"localhost:{address.rpartition(':')[2]}", credentials=credentials) as client:
            client.classify(png(40, 57))

        def exported() -> str:
            url = f"http://127.0.0.1:{line.strip().rpartition(':')[2]}/metrics"
            with urllib.request.urlopen(url, timeout=20) as response:
                return str(response.read().decode())

        eventually(lambda: "prelunet_calls_total{" in exported())  # counted shortly after the answer
        text = exported()
    return [(each.name, each.labels) for family in text_string_to_metric_families(text) for each in family.samples]


def rule_expressions() -> list[str]:
    (document,) = read_yaml(PROMETHEUS / "prelunet.rules.yml")
    return [rule["expr"] for group in document["groups"] for rule in group["rules"]]


def dashboard_expressions() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return queries + [variable["query"]["query"] for variable in dashboard["templating"]["list"]]


def adapter_rules() -> list[Json]:
    (document,) = read_yaml(DEPLOY / "kubernetes" / "autoscaled" / "adapter-values.yaml")
    return list(document["rules"]["custom"])


def adapter_expressions() -> list[str]:
    """Return the queries of prometheus-adapter for one pod."""
    filled = {"<<.LabelMatchers>>": 'namespace="prelunet",pod="a"', "<<.GroupBy>>": "pod"}
    expressions = []
    for rule in adapter_rules():
        query = rule["metricsQuery"].replace("<<.Series>>", rule["seriesQuery"].partition("{")[0])
        for name, value in filled.items():
            query = query.replace(name, value)
        expressions += [rule["seriesQuery"], query]
    return expressions


@pytest.mark.parametrize("source", [rule_expressions, dashboard_expressions, adapter_expressions])
def test_every_metric_and_label_of_rules_and_dashboard_is_exported(
    exported_series: list[tuple[str, dict[str, str]]], source: Callable[[], list[str]]
) -> None:
    # Prometheus adds the first four to each series, and a server of several processes the last one.
    own = {"job", "instance", "namespace", "pod", "process"}
    for expression in source():
        selectors = re.findall(r"\b((?:prelunet|process)_\w+)(?:\{([^}]*)\})?", expression)
        known = set(own)
        for name, matchers in selectors:
            series = [labels for exported, labels in exported_series if exported == name]
            assert series, f"{name} is not exported: {expression}"
            known |= set(series[0])
            for label, operator, value in re.findall(r'(\w+)\s*(=~|!=|=)\s*"([^"]*)"', matchers):
                assert label in {*series[0], *own}, f"{name} has no label {label}: {expression}"
                if label in own or "$" in value:
                    continue
                for choice in value.split("|") if operator == "=~" else [value]:
                    assert any(each[label] == choice for each in series), f"no {label}={choice}: {expression}"
        grouped = re.findall(r"(?:by|on) \(([^)]*)\)", expression) + re.findall(r", (\w+)\)$", expression)
        used = {label.strip() for labels in grouped for label in labels.split(",")}
        assert used <= known, f"unknown labels {used - known}: {expression}"
        assert selectors or "up{" in expression, expression


def test_every_alert_has_a_severity_a_summary_and_a_test() -> None:
    (document,) = read_yaml(PROMETHEUS / "prelunet.rules.yml")
    (tests,) = read_yaml(PROMETHEUS / "prelunet.rules.test.yml")
    tested = {each["alertname"] for test in tests["tests"] for each in test.get("alert_rule_test", ())}
    rules = [rule for group in document["groups"] for rule in group["rules"]]
    assert {rule["alert"] for rule in rules} == tested
    assert all(rule["labels"]["severity"] in {"page", "ticket"} and rule["annotations"]["summary"] for rule in rules)


@pytest.mark.parametrize("words", [("check", "config", "prometheus.yml"), ("test", "rules", "prelunet.rules.test.yml")])
def test_promtool_accepts_the_configuration_and_the_alerts_come_when_they_should(words: tuple[str, ...]) -> None:
    checked_by("promtool", "prometheus", *words)


def test_promtool_parses_every_query_of_the_dashboard_and_of_the_autoscaler(tmp_path: Path) -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]] + adapter_expressions()
    rules = [
        {"record": f"query:{number}", "expr": query.replace("$__rate_interval", "5m")}
        for number, query in enumerate(queries)
    ]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked_by("promtool", "prometheus", "check", "rules", str(tmp_path / "queries.yml"))


@pytest.mark.parametrize("tls", [False, True])
def test_proxies_accept_their_configurations(tmp_path: Path, tls: bool) -> None:
    for source in ("haproxy/haproxy.cfg", "nginx/prelunet.conf"):
        text = (DEPLOY / source).read_text(encoding="utf-8")
        if tls:
            text = re.sub(r"^( *).*# with TLS: ", r"\1", text, flags=re.MULTILINE)
            text = re.sub(r"/etc/(haproxy|nginx)/", f"{tmp_path}/", text)
        (tmp_path / Path(source).name).write_text(text, encoding="utf-8")
    (tmp_path / "proxy.pem").write_text((TLS / "server.pem").read_text() + (TLS / "server.key").read_text())
    shutil.copyfile(TLS / "server.key", tmp_path / "proxy.key")
    shutil.copyfile(TLS / "ca.pem", tmp_path / "ca.pem")
    (tmp_path / "nginx.conf").write_text(NGINX_MAIN, encoding="utf-8")
    checked_by("haproxy", "haproxy", "-c", "-f", str(tmp_path / "haproxy.cfg"))
    checked_by("nginx", "nginx-light", "-t", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"))


def checked_by(program: str, package: str, *words: str) -> None:
    """Run a checker in the folder of Prometheus' files."""
    path = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if path is None:
        pytest.skip(f"{program} is missing; on Debian: apt-get install --no-install-recommends {package}")
    done = subprocess.run([path, *words], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_haproxy_finds_a_stopping_server_in_its_lame_duck_period(served: Served) -> None:
    text = (DEPLOY / "haproxy" / "haproxy.cfg").read_text(encoding="utf-8")
    given = re.findall(r"^# Give the servers: (.*) --trusted-proxies", text, re.MULTILINE)[0].split()
    options = served("--model", "a=a.onnx", *given, "--trusted-proxies", "10.0.0.1")
    (check,) = re.findall(r"check inter (\d+)ms fall (\d+) .*port (\d+)", text)
    (late,) = re.findall(r"timeout check (\d+)s", text)
    assert int(check[0]) * int(check[1]) / 1000 + int(late) < options.lame_duck
    assert int(check[2]) == options.metrics_port


def test_the_dashboard_uses_the_provisioned_data_source_and_no_panels_overlap() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    (provisioned,) = read_yaml(DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml")
    uids = {source["uid"] for source in provisioned["datasources"]}
    used = [*dashboard["panels"], *(target for panel in dashboard["panels"] for target in panel["targets"])]
    assert {each["datasource"]["uid"] for each in used} == uids
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
