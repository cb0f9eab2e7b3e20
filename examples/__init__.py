"""Programs that use jaxflash the way a project of yours would."""
