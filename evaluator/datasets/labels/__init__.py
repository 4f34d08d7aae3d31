"""Where an image's class comes from: lists, devkits, class files, names of folders."""
