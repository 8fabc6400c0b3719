"""elastic/cli/scripts"""
