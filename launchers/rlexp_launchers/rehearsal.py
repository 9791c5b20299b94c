"""`launcher.dry_run=true`: every command is printed, in the order of a calm day, and none is run."""

from collections.abc import Mapping, Sequence

from rlexp.sweep.worker import Task
from rlexp_launchers import worker_scripts
from rlexp_launchers.setting import Kind, Setting


def show(setting: Setting, tasks: Sequence[Task], kinds: Mapping[str, Kind], names: Sequence[str]) -> None:
    """Prints the commands of all packs, on as many slices as there are names."""
    gcloud, queued = setting.gcloud, setting.ask.queued
    gcloud.check()
    there: dict[str, Kind] = {}
    for number, task in enumerate(tasks):
        name, kind, job = names[number % len(names)], kinds[task.name], f"{task.name}-1"
        workers, fresh = range(kind.workers), there.get(name) != kind
        if fresh and name in there:
            gcloud.delete(name, queued=queued)
        gcloud.describe(name, queued=queued)
        if fresh:
            gcloud.create(name, kind.accelerator, setting.ask, boot=setting.boot_file(name))
            gcloud.describe(name, queued=queued)
        there[name] = kind
        for worker in workers:
            gcloud.ssh(name, worker, setting.hello(name))
        if fresh:
            for worker in workers:
                gcloud.copy(setting.tarball.path, name, worker, worker_scripts.archive(setting.tarball.code))
            for worker in workers:
                gcloud.ssh(name, worker, setting.set_up())
        for worker in workers:
            script = setting.start(task, job, kind, "ADDRESS:PORT", worker)
            gcloud.ssh(name, worker, script, environment=setting.environment)
        for worker in workers:
            gcloud.ssh(name, worker, worker_scripts.look(job, 0 if worker == 0 else None))
    for name in there:
        gcloud.delete(name, queued=queued)
