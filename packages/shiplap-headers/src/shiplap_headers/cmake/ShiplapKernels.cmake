# shiplap_add_kernels(<name> SOURCES <file>... DESTINATION <package directory>)
#
# Adds the kernel library lib<name>.so: plain C ABI (shiplap/abi.h), no Python, no torch. DESTINATION is the package
# that owns it, relative to the import root, for example mylib. The library ends up
#   in the wheel             <DESTINATION>/
#   in an editable install   src/<DESTINATION>/ of the project, where the package looks beside its own __file__
#   in a plain CMake build   <build>/lib/, for SHIPLAP_LIBRARY_PATH

include_guard(GLOBAL)

option(SHIPLAP_SANITIZE "Build the kernel libraries with the address and undefined-behaviour sanitizers" OFF)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

get_filename_component(SHIPLAP_INCLUDE_DIR "${CMAKE_CURRENT_LIST_DIR}/../include" ABSOLUTE)

function(shiplap_add_kernels name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "DESTINATION" "SOURCES")
  if(NOT arg_SOURCES OR NOT arg_DESTINATION OR arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "usage: shiplap_add_kernels(<name> SOURCES <file>... DESTINATION <package directory>)")
  endif()

  add_library(${name} SHARED ${arg_SOURCES})
  target_include_directories(${name} PRIVATE "${SHIPLAP_INCLUDE_DIR}")
  target_link_libraries(${name} PRIVATE Threads::Threads)
  target_compile_options(${name} PRIVATE -Wall -Wextra)
  # Only what the ABI header exports leaves the library: two kernel libraries in one process cannot collide.
  set_target_properties(${name} PROPERTIES
    CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF
    CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)

  if(SHIPLAP_SANITIZE)
    set(sanitize -fsanitize=address,undefined)
    target_compile_options(${name} PRIVATE ${sanitize} -fno-omit-frame-pointer -O1 -g)
    target_link_options(${name} PRIVATE ${sanitize})
  else()
    # A forgotten definition fails here, not at dlopen. (Sanitizer runtimes may be resolved at load time.)
    target_link_options(${name} PRIVATE -Wl,--no-undefined)
  endif()

  # SKBUILD_STATE: scikit-build-core, "editable" for `pip install -e`; it does not run the install step then.
  if(SKBUILD_STATE STREQUAL "editable")
    set(output "${PROJECT_SOURCE_DIR}/src/${arg_DESTINATION}")
  else()
    set(output "${CMAKE_BINARY_DIR}/lib")
  endif()
  set_target_properties(${name} PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${output}")
  install(TARGETS ${name} LIBRARY DESTINATION "${arg_DESTINATION}")
endfunction()
