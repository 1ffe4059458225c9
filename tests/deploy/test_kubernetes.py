"""The Kubernetes manifests: valid against the published schemas, in agreement with each other and with the program.

Kubernetes' own objects are checked against the strict schemas that `kubernetes-validate` brings, a LeaderWorkerSet
against leaderworkerset.schema.json, its pod templates as pods.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from widemesh.serving.grpc.servicer import SERVICE_NAME
from widemesh.tools import cli
from widemesh.tools.serve import Serve

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
SCHEMA = json.loads(Path(__file__).with_name("leaderworkerset.schema.json").read_text(encoding="utf-8"))
KUBERNETES = ("1.30", "1.37")  # the oldest and the newest version that the manifests are checked for

Manifest = dict[str, Any]


def read(path: Path) -> list[Manifest]:
    """The objects of a file."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


FILES: list[str] = read(FOLDER / "kustomization.yaml")[0]["resources"]
OBJECTS = {f"{found['kind']}/{found['metadata']['name']}": found for file in FILES for found in read(FOLDER / file)}
ENGINE, GATEWAY = OBJECTS["LeaderWorkerSet/widemesh"], OBJECTS["Deployment/widemesh-gateway"]
# What the LeaderWorkerSet controller sets in a pod, here in the second one.
CONTROLLER = {"LWS_LEADER_ADDRESS": "widemesh-0.widemesh.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "1"}


def check(manifest: Manifest, version: str) -> None:
    """Raises jsonschema.ValidationError for what a cluster of this version would refuse or ignore."""
    if manifest["kind"] != "LeaderWorkerSet":
        kubernetes_validate.validate(manifest, version, strict=True)
        return
    jsonschema.Draft202012Validator(SCHEMA).validate(manifest)
    for name in ("leaderTemplate", "workerTemplate"):
        template = manifest["spec"]["leaderWorkerTemplate"].get(name)
        if template is not None:
            metadata = {"name": "pod", **template.get("metadata", {})}
            check({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}, version)


def template(manifest: Manifest) -> Manifest:
    """The pods that an object makes."""
    spec = manifest["spec"]
    return spec["leaderWorkerTemplate"]["workerTemplate"] if manifest["kind"] == "LeaderWorkerSet" else spec["template"]


def container(manifest: Manifest) -> Manifest:
    (found,) = template(manifest)["spec"]["containers"]
    return found


def flag(manifest: Manifest, name: str) -> str:
    """The value of `--name=value` in the command of an object's container."""
    (found,) = (word.partition("=")[2] for word in container(manifest)["command"] if word.startswith(f"--{name}="))
    return found


def serve_commands(manifest: Any) -> Iterator[list[str]]:
    """Every command or argument list that calls `widemesh`, wherever it stands."""
    if isinstance(manifest, dict):
        for key, value in manifest.items():
            if key in ("command", "args") and "widemesh" in value:
                yield value
            else:
                yield from serve_commands(value)
    elif isinstance(manifest, list):
        for value in manifest:
            yield from serve_commands(value)


def parsed(tmp_path: Path, environment: Mapping[str, str] = CONTROLLER) -> Serve:
    """What the engine's command and its settings file mean."""
    (command,) = (words for found in OBJECTS.values() for words in serve_commands(found))
    settings = tmp_path / "engine.yaml"
    settings.write_text(OBJECTS["ConfigMap/widemesh-config"]["data"]["engine.yaml"])
    words = [re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word) for word in command]
    program, *rest = [word.replace("/etc/widemesh/engine.yaml", str(settings)) for word in words]
    assert program == "widemesh"
    found = cli._parse(*cli._find(rest))
    assert isinstance(found, Serve)
    return found


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", OBJECTS)
def test_manifest_is_valid(name: str, version: str) -> None:
    check(OBJECTS[name], version)


def test_every_manifest_is_applied() -> None:
    there = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(FILES) == there
    assert len(OBJECTS) == sum(len(read(FOLDER / file)) for file in FILES)


def broken_copy(name: str, change: Callable[[Manifest], Any]) -> Manifest:
    broken = copy.deepcopy(OBJECTS[name])
    change(broken)
    return broken


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("Service/widemesh-engine", lambda o: o["spec"]["ports"][0].update(port="http"), "'http' is not of type"),
        ("Service/widemesh-engine", lambda o: o["spec"].update(selectors={}), "selectors"),
        ("Deployment/widemesh-gateway", lambda o: o["spec"].pop("selector"), "'selector' is a required property"),
        ("Deployment/widemesh-gateway", lambda o: container(o)["readinessProbe"].update(http={}), "http"),
        ("ConfigMap/widemesh-config", lambda o: o["data"].update(size=4), "4 is not of type 'string'"),
        ("LeaderWorkerSet/widemesh", lambda o: o["spec"].update(size=4), "size"),
        ("LeaderWorkerSet/widemesh", lambda o: o["spec"]["leaderWorkerTemplate"].update(size=0), "0 is less than"),
        ("LeaderWorkerSet/widemesh", lambda o: o["spec"].update(startupPolicy="Parallel"), "'Parallel' is not one of"),
        ("LeaderWorkerSet/widemesh", lambda o: container(o)["readinessProbe"]["grpc"].update(port="grpc"), "'grpc'"),
        ("LeaderWorkerSet/widemesh", lambda o: container(o)["resources"].update(gpus=8), "gpus"),
    ],
)
def test_a_broken_manifest_is_refused(name: str, change: Callable[[Manifest], Any], message: str) -> None:
    broken = broken_copy(name, change)
    assert broken != OBJECTS[name]
    with pytest.raises(jsonschema.ValidationError, match=re.escape(message)):
        check(broken, KUBERNETES[-1])


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(kubernetes_validate.utils.SchemaNotFoundError):
        check(broken_copy("Service/widemesh-engine", lambda o: o.update(kind="Servise")), KUBERNETES[-1])


# --- the engine's command and its settings ---------------------------------------------------------------------------


def test_the_engines_command_is_understood(tmp_path: Path) -> None:
    serve = parsed(tmp_path)
    assert serve.engine.model == "/models/flash"
    assert (serve.engine.served_model_name, serve.engine.numerics) == ("deepseek-v4.1-flash", "serving")
    assert (serve.server.host, serve.server.port, serve.metrics.metrics_port) == ("0.0.0.0", 50051, 9090)


def test_the_processes_of_a_group_meet(tmp_path: Path) -> None:
    size = ENGINE["spec"]["leaderWorkerTemplate"]["size"]
    for rank in range(size):
        controller = {**CONTROLLER, "LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": str(rank)}
        found = parsed(tmp_path, controller).processes
        assert (found.num_processes, found.process_id) == (size, rank)
        assert found.coordinator == "widemesh-0.widemesh.default:5557"


def test_a_misspelt_flag_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    engine = broken_copy("LeaderWorkerSet/widemesh", lambda o: container(o)["command"].append("--max-model-length=5"))
    monkeypatch.setitem(OBJECTS, "LeaderWorkerSet/widemesh", engine)
    with pytest.raises(SystemExit):
        parsed(tmp_path)
    assert re.search(r"Unrecognized options?: --max-model-length=5 ", capsys.readouterr().err)


def test_each_pod_holds_its_part_of_both_meshes(tmp_path: Path) -> None:
    engine, size = parsed(tmp_path).engine, ENGINE["spec"]["leaderWorkerTemplate"]["size"]
    gpus = int(container(ENGINE)["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus == 8
    assert engine.prefill_devices % size == engine.decode_devices % size == 0
    assert engine.prefill_devices + engine.decode_devices == size * gpus


def test_the_group_starts_and_fails_together() -> None:
    """A leader is ready only when its workers are there, and no process goes on without the others."""
    assert ENGINE["spec"]["startupPolicy"] == "LeaderCreated"
    assert ENGINE["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_the_manifests_are_no_part_of_the_package() -> None:
    settings = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert settings["packages"]["find"] == {"include": ["widemesh*"]}
    assert not list(FOLDER.parent.rglob("*.py"))


# --- agreement of the objects with each other -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "maker"),
    [("Service/widemesh-engine", ENGINE), ("PodDisruptionBudget/widemesh-engine", ENGINE),
     ("Service/widemesh-gateway", GATEWAY), ("PodDisruptionBudget/widemesh-gateway", GATEWAY),
     ("Deployment/widemesh-gateway", GATEWAY)],
)  # fmt: skip
def test_selectors_find_the_pods_of_one_role(name: str, maker: Manifest) -> None:
    selector = OBJECTS[name]["spec"]["selector"]
    wanted = selector.get("matchLabels", selector).items()
    for other in (ENGINE, GATEWAY):
        assert (wanted <= template(other)["metadata"]["labels"].items()) == (other is maker)


def test_services_lead_to_ports_that_are_there() -> None:
    for name, maker in (("Service/widemesh-engine", ENGINE), ("Service/widemesh-gateway", GATEWAY)):
        there = {port["name"] for port in container(maker)["ports"]}
        assert {port["targetPort"] for port in OBJECTS[name]["spec"]["ports"]} <= there
    ports = {port["name"]: port["containerPort"] for port in container(ENGINE)["ports"]}
    assert ports == {"grpc": int(flag(ENGINE, "port")), "metrics": int(flag(ENGINE, "metrics-port"))}
    assert container(GATEWAY)["ports"][0]["containerPort"] == int(flag(GATEWAY, "port"))


def test_probes_ask_the_engines_health_service() -> None:
    readiness, liveness = (container(ENGINE)[name]["grpc"] for name in ("readinessProbe", "livenessProbe"))
    assert readiness == {"port": int(flag(ENGINE, "port")), "service": SERVICE_NAME}
    assert liveness == {"port": int(flag(ENGINE, "port"))}


def test_volumes_and_names_are_there() -> None:
    pod = template(ENGINE)["spec"]
    mounted = [mount["name"] for mount in container(ENGINE)["volumeMounts"]]
    assert sorted(mounted) == sorted(volume["name"] for volume in pod["volumes"])
    (config,) = (volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume)
    assert f"ConfigMap/{config}" in OBJECTS
    account = template(GATEWAY)["spec"]["serviceAccountName"]
    binding = OBJECTS["RoleBinding/widemesh-gateway"]
    assert f"ServiceAccount/{account}" in OBJECTS and binding["subjects"][0]["name"] == account
    assert f"{binding['roleRef']['kind']}/{binding['roleRef']['name']}" in OBJECTS


def test_the_gateway_finds_the_engines_pods_and_no_others() -> None:
    command = container(GATEWAY)["command"]
    wanted = dict(word.split("=") for word in command[command.index("--selector") + 1 :])
    assert wanted.items() <= template(ENGINE)["metadata"]["labels"].items()
    assert not wanted.items() <= template(GATEWAY)["metadata"]["labels"].items()
    assert flag(GATEWAY, "service-discovery-port") == flag(ENGINE, "port")
    assert OBJECTS["Role/widemesh-gateway"]["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    ]
