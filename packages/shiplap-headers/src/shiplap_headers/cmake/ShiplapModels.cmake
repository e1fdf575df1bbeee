# shiplap_add_program(<name> SOURCES <file>...)
#
# Adds a program that loads models which shiplap.packaging.package_model has made: torch's libraries, no Python.
# find_package(Torch) needs CMAKE_PREFIX_PATH:
#   cmake -B build -DCMAKE_PREFIX_PATH="$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')"
# A package runs with the release of torch that it was made with: pass SHIPLAP_TORCH_VERSION to have that checked here.

include_guard(GLOBAL)

find_package(Torch REQUIRED)
if(SHIPLAP_TORCH_VERSION AND NOT Torch_VERSION VERSION_EQUAL SHIPLAP_TORCH_VERSION)
  message(FATAL_ERROR "the models are for torch ${SHIPLAP_TORCH_VERSION}, and torch ${Torch_VERSION} was found")
endif()

function(shiplap_add_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES")
  if(NOT arg_SOURCES OR arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "usage: shiplap_add_program(<name> SOURCES <file>...)")
  endif()

  add_executable(${name} ${arg_SOURCES})
  set_target_properties(${name} PROPERTIES CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON)
  # A package looks its operators up in libtorch_cpu.so, which the program itself may not call.
  target_link_options(${name} PRIVATE -Wl,--no-as-needed)
  target_link_libraries(${name} PRIVATE ${TORCH_LIBRARIES} ${CMAKE_DL_LIBS})
endfunction()
