"""All tasks of the demo model: to add one, write its generator and name it in its module's ``TASKS``."""

from worker.demo.items import Task
from worker.demo.tasks import chat, honesty, knowledge, numbers, stories, structure, text, unicode_code

MODULES = (numbers, text, structure, knowledge, stories, chat, honesty, unicode_code)
TASKS: dict[str, Task] = {task.name: task for module in MODULES for task in module.TASKS}
