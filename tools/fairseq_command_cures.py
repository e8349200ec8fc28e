"""What fairseq's commands hid from those who type them: what is wrong, what there is to choose, what did nothing.

Each row of a cure: a file, what stands there, and what takes its place (`fairseq_cures.Edit`).
"""

_OPTIONS = "fairseq/options.py"
_INTERACTIVE = "fairseq_cli/interactive.py"
_UTILS = "fairseq/utils.py"

COMMAND_CURES: dict[str, list[tuple[str, str, str]]] = {
    # A command that names no plugin ended in errors of other names where it, or its checkpoint, needs one: KeyErrors
    # of messages that were formatted twice, and of None.
    "plugins_are_named": [
        (
            "fairseq/models/__init__.py",
            """        f"Could not infer model type from {cfg}. "
        "Available models: {}".format(MODEL_DATACLASS_REGISTRY.keys())
        + f" Requested model type: {model_type}"
""",
            '        f"There is no model {model_type!r}; --user-dir must name the folder of its plugin"\n',
        ),
        (
            "fairseq/tasks/__init__.py",
            'f"Could not infer task type from {cfg}. Available argparse tasks: {TASK_REGISTRY.keys()}. '
            'Available hydra tasks: {TASK_DATACLASS_REGISTRY.keys()}"',
            'f"There is no task {task_name!r}; --user-dir must name the folder of its plugin"',
        ),
        (
            _OPTIONS,
            """    if hasattr(args, "arch"):
        model_specific_group""",
            """    if hasattr(args, "arch") and args.arch is None:
        parser.error("the following arguments are required: --arch")
    if hasattr(args, "arch"):
        model_specific_group""",
        ),
        (
            _OPTIONS,
            "        TASK_REGISTRY[args.task].add_args(parser)\n",
            """        if args.task is None:
            parser.error("the following arguments are required: --task")
        TASK_REGISTRY[args.task].add_args(parser)
""",
        ),
        (
            _OPTIONS,
            """    usr_args, _ = usr_parser.parse_known_args(input_args)
    utils.import_user_module(usr_args)
""",
            """    usr_args, _ = usr_parser.parse_known_args(input_args)
    utils.import_user_module(usr_args)

    # An unknown name may be that of a plugin.
    from fairseq.tasks import TASK_REGISTRY

    named_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    named_parser.add_argument("--arch", "-a")
    named_parser.add_argument("--task")
    for name, value in vars(named_parser.parse_known_args(input_args)[0]).items():
        known = ARCH_MODEL_REGISTRY if name == "arch" else TASK_REGISTRY
        if value is not None and value not in known and usr_args.user_dir is None:
            parser.error(
                f"argument --{name}: there is no {value!r}; if it is of a plugin, --user-dir must name its folder"
            )
""",
        ),
        (
            _OPTIONS,
            """    usr_args, _ = usr_parser.parse_known_args()
    utils.import_user_module(usr_args)
""",
            """    usr_args, _ = usr_parser.parse_known_args()
    try:
        utils.import_user_module(usr_args)
    except FileNotFoundError as error:
        if str(error).startswith("--user-dir: "):
            usr_parser.exit(2, f"{usr_parser.prog}: error: argument {error}\\n")
        raise
""",
        ),
        ("fairseq/registry.py", '"{} is required!"', '"--{} is required"'),
    ],
    # An installed plugin was found by its name only where its folder lies beside fairseq's: that of an editable
    # installation does not. A package that a program had imported before counted as registered, and was not.
    "installed_plugins": [
        (
            _UTILS,
            "                    raise FileNotFoundError(module_path)\n",
            """                    name = os.path.normpath(args.user_dir)
                    spec = importlib.util.find_spec(name) if name.isidentifier() else None
                    if spec is None or not spec.submodule_search_locations:
                        missing = f"--user-dir: there is no folder {module_path}"
                        installed = f", and no package {name} is installed"
                        raise FileNotFoundError(missing + (installed if name.isidentifier() else ""))
                    module_path = list(spec.submodule_search_locations)[0]
        module_path = os.path.abspath(module_path)
""",
        ),
        (
            _UTILS,
            """                importlib.import_module(module_name)

                tasks_path = os.path.join(module_path, "tasks")
                if os.path.exists(tasks_path):
                    from fairseq.tasks import import_tasks

                    import_tasks(tasks_path, f"{module_name}.tasks")

                models_path = os.path.join(module_path, "models")
                if os.path.exists(models_path):
                    from fairseq.models import import_models

                    import_models(models_path, f"{module_name}.models")
            elif module_path in sys.modules[module_name].__path__:
                logger.info(f"--user-dir={module_path} has already been imported.")
            else:
""",
            """                importlib.import_module(module_name)
            elif os.path.realpath(module_path) not in map(
                os.path.realpath, getattr(sys.modules[module_name], "__path__", [])
            ):
""",
        ),
        (
            _UTILS,
            """"something unique and try again.".format(module_path, module_name)
                )
""",
            """"something unique and try again.".format(module_path, module_name)
                )

            # What is imported already registers nothing once more.
            tasks_path = os.path.join(module_path, "tasks")
            if os.path.exists(tasks_path):
                from fairseq.tasks import import_tasks

                import_tasks(tasks_path, f"{module_name}.tasks")

            models_path = os.path.join(module_path, "models")
            if os.path.exists(models_path):
                from fairseq.models import import_models

                import_models(models_path, f"{module_name}.models")
""",
        ),
        (_UTILS, "import importlib\n", "import importlib\nimport importlib.util\n"),
    ],
    # --help ended the reading of options before those of the model and of the task were known. Usage was a hundred
    # lines, which hid the line below it that says what is wrong.
    "whole_help": [
        (
            _OPTIONS,
            """    args, _ = parser.parse_known_args(input_args)

    # Add model""",
            """    given = sys.argv[1:] if input_args is None else input_args
    args, _ = parser.parse_known_args([word for word in given if word not in ("-h", "--help")])

    # Add model""",
        ),
        (_OPTIONS, "import argparse\nfrom pathlib", "import argparse\nimport sys\nfrom pathlib"),
        (
            _OPTIONS,
            "    parser = argparse.ArgumentParser(allow_abbrev=False)\n    gen_parser",
            '    usage = "%(prog)s DATA [OPTIONS]; --help lists the options, with --arch and --task theirs too"\n'
            "    parser = argparse.ArgumentParser(allow_abbrev=False, usage=usage)\n    gen_parser",
        ),
        # Those of a model that wants groups for them.
        (
            _OPTIONS,
            """        if args.arch in ARCH_MODEL_REGISTRY:
            ARCH""",
            """        if hasattr(ARCH_MODEL_REGISTRY.get(args.arch), "add_groups"):
            ARCH_MODEL_REGISTRY[args.arch].add_groups(parser)
        if args.arch in ARCH_MODEL_REGISTRY:
            ARCH""",
        ),
    ],
    # Every program that imports a task was told that tensorboardX is missing, which it does not need.
    "no_advertisements": [
        ("fairseq/tasks/text_to_speech.py", 'logger.info("Please install', 'logger.debug("Please install')
    ],
    # --lm-path of fairseq-generate, which fairseq-interactive lists and did not read.
    "interactive_language_models": [
        (
            _INTERACTIVE,
            "    # Optimize ensemble for generation\n    for model in models:\n",
            """    lms = [None]
    if cfg.generation.lm_path is not None:
        overrides["data"] = cfg.task.data
        lms, _ = checkpoint_utils.load_model_ensemble(
            [cfg.generation.lm_path], arg_overrides=overrides, task=None
        )

    # Optimize ensemble for generation
    for model in [*models, *lms]:
""",
        ),
        (
            _INTERACTIVE,
            "task.build_generator(models, cfg.generation)\n",
            """task.build_generator(
        models,
        cfg.generation,
        extra_gen_cls_kwargs={"lm_model": lms[0], "lm_weight": cfg.generation.lm_weight},
    )
""",
        ),
    ],
    # bitarray >= 3 has no `util.rindex`.
    "bits_from_the_right": [("fairseq/data/huffman/huffman_coder.py", "util.rindex(a, 1)", "a.find(1, right=True)")],
}
