def goals(folder, given=None):
    return []
