from prism.atomic import atomic_file as atomic_file
