"""The shipped deployment files, as read by Ray, KubeRay, Prometheus and Grafana."""

import json
import re
import shlex

import yaml

from cli.main import _parser
from cluster.jobs import submit as jobs
from configs.load import load
from planning.placement import Node, needs_of, place
from records.metrics import METRICS, exported_name
from tests.cluster.head import ROOT

DEPLOY = ROOT / "deploy"


def test_the_shipped_runtime_env_is_what_submit_sends():
    assert yaml.safe_load((DEPLOY / "runtime_env.yaml").read_text()) == jobs.RUNTIME_ENV
    assert int(jobs.RUNTIME_ENV["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 30
    ignored = [
        line
        for line in (ROOT / ".rayignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert ignored == list(jobs.LEFT_OUT)


def test_the_kuberay_manifest_names_a_valid_configuration():
    manifest = yaml.safe_load((DEPLOY / "kuberay" / "rayjob.yaml").read_text())
    spec = manifest["spec"]
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    command = shlex.split(spec["entrypoint"])
    assert command[:3] == ["python", "-m", "cluster"]
    options = _parser().parse_args(command[3:])
    config = load(options.config, options.overrides)
    jobs.check_run_root_of_job(config)
    env = yaml.safe_load(spec["runtimeEnvYAML"])
    assert env["env_vars"] == jobs.RUNTIME_ENV["env_vars"]
    cluster = spec["rayClusterSpec"]
    assert cluster["autoscalerOptions"]["version"] == "v2"  # v1 ignores labels
    rollout, learner = cluster["workerGroupSpecs"]
    most = config.services.rollout.max_actors
    assert most is not None
    assert rollout["maxReplicas"] * 8 * 1.0 >= most * config.services.rollout.gpus
    grace = cluster["headGroupSpec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > int(env["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) and learner["maxReplicas"] == 1


def test_the_run_of_the_kuberay_manifest_has_room_on_the_nodes_that_the_autoscaler_reads():
    from ray.autoscaler._private.kuberay import autoscaling_config

    spec = yaml.safe_load((DEPLOY / "kuberay" / "rayjob.yaml").read_text())["spec"]
    cluster = spec["rayClusterSpec"]
    kinds = autoscaling_config._generate_available_node_types_from_ray_cr_spec(cluster)
    nodes = [
        Node(f"{name}-{n}", has["CPU"], has["GPU"], kind["labels"])
        for name, kind in kinds.items()
        for n in range(kind["min_workers"] or 1)  # there is one head
        for has in [kind["resources"]]
    ]
    options = _parser().parse_args(shlex.split(spec["entrypoint"])[3:])
    where = place(needs_of(load(options.config, options.overrides)), nodes)
    assert {where[f"rollout-{n}"] for n in range(8)} == {"explorers-0"}
    assert where["learner-0"] == "learner-0"


def test_the_kuberay_manifest_is_one_that_kuberay_accepts():
    """KubeRay 1.5 and later refuse labels among the start parameters; tokens came with 1.5.1."""
    spec = yaml.safe_load((DEPLOY / "kuberay" / "rayjob.yaml").read_text())["spec"]
    cluster = spec["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert "labels" not in group["rayStartParams"]
        # either there or among the group's resources
        assert not ("num-gpus" in group["rayStartParams"] and "resources" in group)
        assert group["template"]["spec"]["restartPolicy"] == "Never"
    # without it everybody who reaches the pods could run code in them
    assert cluster["authOptions"] == {"mode": "token"} and cluster["rayVersion"] == "2.60.0"


def test_the_pod_monitors_scrape_ports_of_the_kuberay_manifest():
    spec = yaml.safe_load((DEPLOY / "kuberay" / "rayjob.yaml").read_text())["spec"]
    (head,) = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    # KubeRay adds the first three to the head's service only if there are no others
    assert {"gcs-server": 6379, "dashboard": 8265, "client": 10001}.items() <= ports.items()
    options = _parser().parse_args(shlex.split(spec["entrypoint"])[3:])
    logging = load(options.config, options.overrides).logging
    assert (logging.prometheus_host, logging.prometheus_port) == ("0.0.0.0", ports["sol-rl"])
    monitors = yaml.safe_load_all((DEPLOY / "kuberay" / "podmonitors.yaml").read_text())
    ends = [end for monitor in monitors for end in monitor["spec"]["podMetricsEndpoints"]]
    assert [end["port"] for end in ends] == ["sol-rl", "metrics"] and ports["metrics"] == 8080
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    jobs = [end["relabelings"][0]["replacement"] for end in ends]
    assert jobs == [job["job_name"] for job in scraped]  # what alerts and dashboards may name


def test_the_cluster_launcher_example_is_valid_for_ray():
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load((DEPLOY / "cluster-launcher.yaml").read_text()))
    validate_config(config)
    assert len(config["provider"]["worker_ips"]) == config["max_workers"]
    assert [kind["min_workers"] for kind in config["available_node_types"].values()] == [2]


def test_the_cluster_launcher_example_starts_ray_as_jobs_need_it():
    """Every node asks for the token, and finds the `python` of jobs. Version 2 of the autoscaler
    would count the head as one of the workers, and so start one less.
    """
    config = yaml.safe_load((DEPLOY / "cluster-launcher.yaml").read_text())
    assert "~/.ray/auth_token" in config["file_mounts"]
    for kind in ("head", "worker"):
        stop, start = config[f"{kind}_start_ray_commands"]
        assert stop == "ENVIRONMENT/bin/ray stop" and " ray start " in start
        assert {"PATH=ENVIRONMENT/bin:$PATH", "RAY_AUTH_MODE=token"} <= set(
            start.replace(";", "").split()
        )
        assert ("RAY_enable_autoscaler_v2=0" in start) == (kind == "head")


def test_the_grafana_dashboard_uses_only_existing_metrics():
    board = json.loads((DEPLOY / "grafana" / "dashboards" / "sol-rl.json").read_text())
    known = {
        exported_name(key) + ("" if metric.kind == "gauge" else "_total")
        for key, metric in METRICS.items()
    }
    requested = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"sol_rl_\w+", target["expr"])
    }
    assert requested <= known, requested - known
    expected = (
        "reward_train_mean",
        "explore_contrast",
        "audit_kendall_tau",
        "busy_rollout",
        "staleness",
        "queue_reward",
        "time_publish_s",
    )
    assert {f"sol_rl_{name}" for name in expected} <= requested
    source = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text()
    )["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"]}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert [job["job_name"] for job in scraped] == ["sol-rl", "ray"]
